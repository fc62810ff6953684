"""Masks from grammars: whatever a random sampler makes of them is JSON that jsonschema finds valid."""

import json
import sys

import jsonschema
import numpy as np
import pytest

from mosaic.format.errors import InputError
from mosaic.recipes import DEMO_CHECKPOINT
from mosaic.runtime.grammar import GrammarMask, Grammars
from mosaic.runtime.sampler import Sampler
from mosaic.runtime.sampling import Sampling, generation_defaults
from mosaic.runtime.tokenizer import Tokenizer
from support.tiny import write_tokenizer
from support.tiny_tokenizer import END_OF_TEXT, IM_END, IM_START, THINK, UNUSED

STOP = frozenset({END_OF_TEXT, IM_END})
MOST_TOKENS = 3000


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Token id = byte, so characters come split, and every mask can be read by eye."""
    folder = tmp_path_factory.mktemp("letters")
    write_tokenizer(folder, 512)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """The demo's: tokens of many bytes, and of parts of characters."""
    return Tokenizer(DEMO_CHECKPOINT)


@pytest.fixture(scope="module")
def grammars(letters: Tokenizer) -> Grammars:
    return Grammars(letters, STOP)


@pytest.fixture(scope="module")
def word_grammars(words: Tokenizer) -> Grammars:
    return Grammars(words, generation_defaults(DEMO_CHECKPOINT).stop)


def allowed(mask: GrammarMask) -> set[int]:
    return set(np.flatnonzero(mask.allowed()).tolist())


def feed(mask: GrammarMask, text: str) -> None:
    """Write a text byte by byte, as the mask allows."""
    for byte in text.encode():
        assert byte in allowed(mask), f"{bytes([byte])} in {text!r}"
        mask.advance(byte)


def written(mask: GrammarMask, tokenizer: Tokenizer, stop: frozenset[int], seed: int) -> str:
    """What a sampler writes that knows nothing but the mask; the longer it gets, the more it likes to close things."""
    random = np.random.default_rng(seed)
    closing = [n for n in range(tokenizer.num_tokens) if n in stop or tokenizer.token_bytes(n) in (b'"', b"]", b"}")]
    sampler = Sampler(Sampling(), seed, tokenizer.num_tokens, mask=mask)
    text = b""
    for step in range(MOST_TOKENS):
        logits = random.normal(size=tokenizer.num_tokens)
        logits[closing] += 2 + step / 20
        token = sampler.choose(logits).token
        if token in stop:
            return text.decode()  # strictly: no character is left half written
        text += tokenizer.token_bytes(token)
    raise AssertionError(f"no end after {MOST_TOKENS} tokens: {text[:200]!r}")


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": -5, "maximum": 1000},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = {
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3},
            "address": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["city", "zip"],
                "additionalProperties": False,
            },
            "email": {"type": ["string", "null"]},
        },
        "required": ["name", "address"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "größer", "赤い", "👍🏽", 7, None, True, {"a": [1]}]},
    "const": {"const": {"e\u0301": "<|im_end|>", "b": [1.5, '\\ " \n']}},
    "array": {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 6},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    "numbers": {
        "type": "object",
        "properties": {
            "i": {"type": "integer"},
            "between": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "even": {"type": "integer", "multipleOf": 2},
        },
        "required": ["i", "between", "even"],
        "additionalProperties": False,
    },
    "string": {"type": "string", "minLength": 20, "maxLength": 30},
    "tree": TREE,
    "union": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "array", "items": {"type": "integer"}}]},
    "date": {"type": "string", "format": "date-time"},
    "open": {"type": "object", "additionalProperties": {"type": "integer"}},
    "anything": {},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_comes_out_is_valid_for_the_schema(grammars, word_grammars, letters, words, name, seed):
    schema = SCHEMAS[name]
    for tokenizer, source, stop in (
        (letters, grammars, STOP),
        (words, word_grammars, generation_defaults(DEMO_CHECKPOINT).stop),
    ):
        text = written(source.json_schema(schema), tokenizer, stop, seed)
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("seed", range(3))
def test_any_object_is_an_object(word_grammars, words, seed):
    text = written(
        word_grammars.json_schema({"type": "object"}), words, generation_defaults(DEMO_CHECKPOINT).stop, seed
    )
    assert type(json.loads(text)) is dict


def test_a_lark_grammar_is_followed(grammars):
    mask = grammars.lark('start: "<think>" /[0-9]+/ "!"')
    assert allowed(mask) == {THINK}  # as the tokenizer would write it
    mask.advance(THINK)
    feed(mask, "12")
    assert allowed(mask) == set(b"0123456789!")
    feed(mask, "!")
    assert allowed(mask) == STOP


def test_stop_tokens_come_where_the_answer_may_end_and_only_there(grammars):
    mask = grammars.json_schema({"type": "integer"})
    assert allowed(mask) == set(b"-0123456789")
    feed(mask, "1")
    assert allowed(mask) == set(b"0123456789") | STOP
    mask.advance(IM_END)


def test_a_finished_answer_allows_stop_tokens_only(grammars):
    mask = grammars.json_schema({"type": "object"})
    feed(mask, '{"a": "€ 𝄞"}')
    assert allowed(mask) == STOP


def test_special_tokens_are_never_text(grammars):
    mask = grammars.json_schema({"type": "string"})
    feed(mask, '"a')
    now = allowed(mask)
    assert not now & {END_OF_TEXT, IM_START, IM_END}
    assert THINK in now  # an added token, but text: <think>
    assert max(now) < UNUSED


def test_a_stop_token_with_a_text_is_no_space_of_the_answer(letters):
    newline = ord("\n")
    mask = Grammars(letters, frozenset({newline})).json_schema({"type": "object"})
    feed(mask, '{"a": [1, 2')
    assert newline not in allowed(mask)
    feed(mask, "]}")
    assert allowed(mask) == {newline}


def test_a_character_may_be_split_and_never_broken(grammars):
    mask = grammars.json_schema({"type": "string"})
    mask.advance(ord('"'))
    euro = "€".encode()
    mask.advance(euro[0])
    assert allowed(mask) <= set(range(0x80, 0xC0))
    mask.advance(euro[1])
    mask.advance(euro[2])
    assert ord('"') in allowed(mask)


def test_space_does_not_go_on_for_ever(grammars):
    mask = grammars.json_schema({"type": "object"})
    feed(mask, "{\n" + " " * 63)
    assert allowed(mask) == set(b'"}')


def test_fixed_text_is_written_in_the_models_own_tokens(word_grammars, words):
    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune"
    mask, tokens = word_grammars.lark(f'start: "{text}"'), []
    sampler = Sampler(Sampling(0.0), None, words.num_tokens, mask=mask)
    while (token := sampler.choose(np.zeros(words.num_tokens)).token) not in generation_defaults(DEMO_CHECKPOINT).stop:
        tokens.append(token)
    assert tokens == words.encode(text)


@pytest.mark.parametrize("text", ["e\u0301", "<|im_end|> <|im_start|>", "<think> </think>"], ids=ascii)
def test_fixed_text_is_exact_though_the_tokenizer_would_change_it(grammars, letters, text):
    """The tokenizer composes the accent, and takes the marks for special tokens."""
    mask = grammars.json_schema({"const": text})
    assert json.loads(written(mask, letters, STOP, 0)) == text


def test_masks_are_independent(grammars):
    one, other = (grammars.json_schema({"enum": ["ab", "cd"]}) for _ in range(2))
    feed(one, '"a')
    feed(other, '"c')
    assert (allowed(one), allowed(other)) == ({ord("b")}, {ord("d")})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "("}, "regex parse error"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3) is greater than maximum (2)"),
        ({"$ref": "#/nowhere"}, "/nowhere"),
        ({"$ref": "https://example.org/schema"}, "https://example.org/schema"),
        ({"$ref": "#"}, ""),  # satisfied by nothing that ends
        ({"enum": [f"number {n}" for n in range(100_000)]}, "too big"),
        ({"default": {1, 2}}, "set is not JSON serializable"),
        ({"minimum": float("nan")}, ""),
        ([], ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_what_was_said(grammars, schema, said):
    with pytest.raises(InputError, match="the JSON schema cannot be followed") as caught:
        grammars.json_schema(schema)
    assert said in caught.value.facts["found"]
    assert len(caught.value.facts["found"]) <= 200


@pytest.mark.parametrize("depth", [200, 20_000])
def test_a_schema_that_is_too_deep_is_refused(grammars, depth):
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(InputError, match="the JSON schema cannot be followed") as caught:
        grammars.json_schema(schema)
    assert "recursion" in caught.value.facts["found"]


@pytest.mark.parametrize("text", ["", "start", "start: other", "start: <nothing>", "start: /((/", "start: start"])
def test_a_grammar_that_cannot_be_followed_is_refused(grammars, text):
    with pytest.raises(InputError, match="the grammar cannot be followed") as caught:
        grammars.lark(text)
    assert "backtrace" not in caught.value.facts["found"]


def test_a_token_that_the_grammar_does_not_have_is_refused(grammars):
    mask = grammars.json_schema({"type": "object"})
    with pytest.raises(InputError, match="the JSON schema cannot be followed"):
        mask.advance(ord("["))


@pytest.mark.parametrize("stop", [frozenset(), frozenset({UNUSED})], ids=["none", "outside"])
def test_a_model_without_stop_tokens_is_refused(letters, stop):
    with pytest.raises(InputError, match="need a stop token"):
        Grammars(letters, stop)


def test_a_missing_library_is_named_with_the_extra_that_has_it(letters, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match="need llguidance") as caught:
        Grammars(letters, STOP)
    assert caught.value.facts["remedy"] == "pip install 'mosaic-moe[serve]'"

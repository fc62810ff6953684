"""The tokenizer held against transformers and the tokenizers library, and its streams against whole decodes."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from mosaic.format.errors import InputError
from mosaic.recipes import DEMO_CHECKPOINT
from mosaic.runtime.tokenizer import TOKENIZER_FILE, Tokenizer, TooLongError
from support.tiny import write_tokenizer
from support.tiny_tokenizer import END_THINK, IM_END, IM_START, THINK, UNUSED

TEXTS = {
    "english": "It is a truth universally acknowledged, that a single man in possession of a good fortune...",
    "code": "def f(x):\n\treturn  x ** 2   # 12345\r\n\n\n",
    "latin": "Füße, naïve façade, Ærøskøbing, Łódź — “quoted”… ½ €",
    "cjk": "你好，世界！これはテストです。한국어도 있습니다. 加拿大",
    "emoji": "👍🏽 👨‍👩‍👧‍👦 🇩🇪 🏴󠁧󠁢󠁥󠁮󠁧󠁿 \U0001f9ff",
    "composed": "é ñ Å ǖ",
    "combining": "é ñ Å x̧̂ नमस्ते ก็",  # NFC composes what it can
    "right_to_left": "שלום עולם, مرحبا بالعالم",
    "controls": "\x00\x01\x7f\x80\x9f\xa0\xad\u200b\u2028\ufeff\ufffd",
    "highest": "\uffff\U00010000\U0010ffff",
    "specials": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n",
    "almost_specials": "<|im_start |> <think > < /think>",
    "spaces": "   \n  \t ",
    "empty": "",
}
SPLIT = {"two": "é", "three": "€", "four": "𝄞", "mixed": "aé€𝄞z", "joined": "👨‍👩‍👧"}
#: What is wrong with it -> bytes. From the tables of the Unicode standard, chapter 3.9, and from RFC 3629.
BROKEN = {
    "lone_continuation": b"a\x80b",
    "two_continuations": b"\x80\xbf",
    "cut_three": b"\xe2\x82",
    "cut_four": b"\xf0\x9d\x84",
    "cut_then_letter": b"\xf0\x9dz",
    "overlong": b"\xc0\xaf \xe0\x80\xaf \xf0\x80\x80\xaf",
    "surrogate": b"\xed\xa0\x80\xed\xb0\x80",
    "too_high": b"\xf4\x90\x80\x80",
    "never": b"\xf5\xfe\xff",
    "standard": b"\x61\xf1\x80\x80\xe1\x80\xc2\x62\x80\x63\x80\xbf\x64",
}


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_CHECKPOINT)


@pytest.fixture(scope="module")
def demo_library() -> Library:
    return Library.from_file(str(DEMO_CHECKPOINT / TOKENIZER_FILE))


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, 512)
    return folder


@pytest.fixture(scope="module")
def byte_tokenizer(byte_folder: Path) -> Tokenizer:
    """Token id = byte, so every split of a character can be written down."""
    return Tokenizer(byte_folder)


@pytest.fixture(scope="module")
def byte_library(byte_folder: Path) -> Library:
    return Library.from_file(str(byte_folder / TOKENIZER_FILE))


@pytest.fixture(scope="module")
def oracle():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)


def streamed(tokenizer: Tokenizer, numbers: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(number) for number in numbers), stream.finish()]


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_encoded_and_decoded_as_by_transformers(demo_tokenizer, oracle, name):
    numbers = demo_tokenizer.encode(TEXTS[name])
    assert numbers == oracle.encode(TEXTS[name], add_special_tokens=False)
    assert demo_tokenizer.decode(numbers) == oracle.decode(
        numbers, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("name", ["english", "code", "latin", "cjk", "emoji", "composed", "right_to_left", "highest"])
def test_text_in_nfc_comes_back_unchanged(demo_tokenizer, byte_tokenizer, name):
    assert demo_tokenizer.decode(demo_tokenizer.encode(TEXTS[name])) == TEXTS[name]
    assert byte_tokenizer.decode(byte_tokenizer.encode(TEXTS[name])) == TEXTS[name]


def test_combining_marks_are_composed_where_nfc_says_so(demo_tokenizer):
    assert demo_tokenizer.encode("e\u0301") == demo_tokenizer.encode("\u00e9")


def test_the_byte_tokenizer_has_bytes_for_ids(byte_tokenizer):
    assert byte_tokenizer.encode("é€\n") == list("é€\n".encode())
    assert [byte_tokenizer.token_bytes(number) for number in range(256)] == [bytes([byte]) for byte in range(256)]


def test_num_tokens_is_one_more_than_the_highest_id(demo_tokenizer, byte_tokenizer, oracle):
    assert byte_tokenizer.num_tokens == UNUSED
    assert demo_tokenizer.num_tokens == max(oracle.get_vocab().values()) + 1 == 4096


def test_every_token_alone_decodes_as_in_the_library(demo_tokenizer, demo_library):
    for number in range(demo_tokenizer.num_tokens):
        assert demo_tokenizer.decode([number]) == demo_library.decode([number], skip_special_tokens=True), number


@pytest.mark.parametrize("name", SPLIT)
def test_every_split_of_a_character_prints_it_once_whole(byte_tokenizer, byte_library, name):
    text = SPLIT[name]
    numbers = list(text.encode())
    pieces = streamed(byte_tokenizer, numbers)
    assert "".join(pieces) == text == byte_tokenizer.decode(numbers) == byte_library.decode(numbers)
    ends = list(itertools.accumulate(len(character.encode()) for character in text))
    printed = dict(zip(ends, text, strict=True))  # a character appears with its last byte and not before
    assert pieces == [printed.get(position, "") for position in range(1, len(numbers) + 1)] + [""]


@pytest.mark.parametrize("name", SPLIT)
def test_a_character_cut_anywhere_ends_in_one_replacement(byte_tokenizer, byte_library, name):
    numbers = list(SPLIT[name].encode())
    for end in range(len(numbers) + 1):
        pieces = streamed(byte_tokenizer, numbers[:end])
        assert "".join(pieces) == byte_library.decode(numbers[:end])
        assert pieces[-1] in ("", "\ufffd")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_utf8_becomes_replacements_as_in_the_library(byte_tokenizer, byte_library, name):
    numbers = list(BROKEN[name])
    text = byte_library.decode(numbers)
    assert "\ufffd" in text
    assert "".join(streamed(byte_tokenizer, numbers)) == text == byte_tokenizer.decode(numbers)


def test_every_pair_of_bytes_decodes_as_in_the_library(byte_tokenizer, byte_library):
    """Pairs decide on the ranges of second bytes; what follows is continuation bytes, covered by random sequences."""
    for first, second in itertools.product(range(0x7F, 0x100), repeat=2):
        numbers = [first, second, 0x80, 0x41]
        assert "".join(streamed(byte_tokenizer, numbers)) == byte_library.decode(numbers), numbers


BYTES = st.one_of(st.integers(0, UNUSED - 1), st.sampled_from([*range(0x80, 0xC8), 0xE0, 0xED, 0xF0, 0xF4]))


@given(st.lists(BYTES, max_size=12))
@settings(max_examples=500, deadline=None)
def test_random_bytes_and_specials_stream_as_they_decode(byte_tokenizer, byte_library, numbers):
    text = "".join(streamed(byte_tokenizer, numbers))
    assert text == byte_tokenizer.decode(numbers) == byte_library.decode(numbers, skip_special_tokens=True)


@given(st.lists(st.integers(0, 4095), max_size=30))
@settings(max_examples=200, deadline=None)
def test_random_demo_tokens_stream_as_they_decode(demo_tokenizer, demo_library, numbers):
    text = "".join(streamed(demo_tokenizer, numbers))
    assert text == demo_tokenizer.decode(numbers) == demo_library.decode(numbers, skip_special_tokens=True)


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_random_text_is_encoded_as_by_the_library(demo_tokenizer, demo_library, text):
    assert demo_tokenizer.encode(text) == demo_library.encode(text, add_special_tokens=False).ids


def test_special_tokens_print_nothing_and_thinking_marks_print(byte_tokenizer):
    numbers = [IM_START, *b"hi", THINK, *b"a", END_THINK, IM_END, 256]
    assert streamed(byte_tokenizer, numbers) == ["", "h", "i", "<think>", "a", "</think>", "", "", ""]


def test_a_special_token_amid_a_character_does_not_break_it(byte_tokenizer, byte_library):
    numbers = [0xE2, IM_END, 0x82, 0xAC]
    assert byte_tokenizer.decode(numbers) == byte_library.decode(numbers, skip_special_tokens=True) == "€"


def test_ids_without_a_token_print_nothing(byte_tokenizer, byte_library):
    assert byte_tokenizer.decode([104, UNUSED, 511, 105]) == byte_library.decode([104, UNUSED, 511, 105]) == "hi"


def test_two_streams_do_not_share_what_waits(byte_tokenizer):
    first, second = byte_tokenizer.stream(), byte_tokenizer.stream()
    assert first.push(0xC3) == ""
    assert second.push(0x41) == "A"
    assert first.push(0xA9) == "é"
    assert second.finish() == first.finish() == ""


def test_added_tokens_with_letters_outside_the_byte_alphabet_decode_as_in_the_library(byte_folder, tmp_path):
    """A space is no letter of the byte-level alphabet; the library then takes the token as it is written."""
    value = json.loads((byte_folder / TOKENIZER_FILE).read_text())
    value["added_tokens"].append(dict(value["added_tokens"][3], id=UNUSED, content="tool call €"))
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(value))
    library = Library.from_file(str(tmp_path / TOKENIZER_FILE))
    assert Tokenizer(tmp_path).decode([65, UNUSED]) == library.decode([65, UNUSED]) == "Atool call €"


def test_vocabulary_entries_outside_the_byte_alphabet_decode_as_in_the_library(byte_folder, tmp_path):
    value = json.loads((byte_folder / TOKENIZER_FILE).read_text())
    value["model"]["vocab"]["a b"] = value["model"]["vocab"].pop("\u00ff")
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(value))
    library = Library.from_file(str(tmp_path / TOKENIZER_FILE))
    assert library.decode([65, 0xFF]) == "Aa b"
    assert Tokenizer(tmp_path).decode([65, 0xFF]) == "Aa b"


def test_truncation_set_in_the_file_does_not_shorten_a_prompt(byte_folder, tmp_path):
    library = Library.from_file(str(byte_folder / TOKENIZER_FILE))
    library.enable_truncation(4)
    library.enable_padding(length=8, pad_id=256, pad_token="<|endoftext|>")
    library.save(str(tmp_path / TOKENIZER_FILE))
    assert Tokenizer(tmp_path).encode("longer than four") == list(b"longer than four")


def test_no_tokenizer_is_refused_with_the_file_named(tmp_path):
    with pytest.raises(InputError, match="no tokenizer") as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path / TOKENIZER_FILE) in str(caught.value)
    assert "remedy" in caught.value.facts


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\x00\x01"])
def test_what_is_no_tokenizer_is_refused(tmp_path, text):
    (tmp_path / TOKENIZER_FILE).write_text(text)
    with pytest.raises(InputError, match="not a tokenizer"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("decoder", [None, {"type": "Fuse"}, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_tokenizer_that_is_not_byte_level_is_refused(byte_folder, tmp_path, decoder):
    shutil.copy(byte_folder / TOKENIZER_FILE, tmp_path)
    value = json.loads((tmp_path / TOKENIZER_FILE).read_text())
    value["decoder"] = decoder
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(value))
    with pytest.raises(InputError, match="not supported") as caught:
        Tokenizer(tmp_path)
    assert str(decoder and decoder["type"]) in caught.value.facts["found"]


def test_text_that_is_no_unicode_is_refused(byte_tokenizer):
    """What Python makes of an argument or a file that is not UTF-8: a lone surrogate."""
    with pytest.raises(InputError):
        byte_tokenizer.encode("a\udcff")


@pytest.mark.parametrize("unit", ["\u1112\u1161\u11ab", "<|endoftext|>", "x", "👍🏽", "e\u0301"])
@pytest.mark.parametrize("which", ["tiny", "demo"])
def test_a_text_is_refused_unread_only_if_it_must_be_too_long(tmp_path, demo_tokenizer, which, unit):
    """Also where a token stands for many bytes, and where normalisation makes the text shorter."""
    write_tokenizer(tmp_path, UNUSED)
    tokenizer = Tokenizer(tmp_path) if which == "tiny" else demo_tokenizer
    text = unit * 50
    tokens = tokenizer.encode(text)
    assert tokenizer.encode(text, len(tokens)) == tokens
    with pytest.raises(TooLongError, match="too long"):
        tokenizer.encode(unit * 1000, 3)


@pytest.mark.parametrize(
    "change", [{"normalizer": {"type": "Lowercase"}}, {"added_tokens": {"lstrip": True}}], ids=["normalizer", "strip"]
)
def test_where_tokens_may_stand_for_anything_no_text_is_refused_unread(tmp_path, change):
    write_tokenizer(tmp_path, UNUSED)
    file = tmp_path / TOKENIZER_FILE
    parts = json.loads(file.read_text())
    if "normalizer" in change:
        parts |= change
    else:
        parts["added_tokens"][0] |= change["added_tokens"]
    file.write_text(json.dumps(parts))
    assert len(Tokenizer(tmp_path).encode("x" * 1000, 3)) == 1000

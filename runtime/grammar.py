"""What an answer must look like, as a mask over tokens: JSON schemas and grammars, by way of llguidance.

The only user of llguidance, which is in the extra `serve`. It works on the bytes of tokens, so characters may be split
over tokens anywhere. One thread at a time may use the masks of one `Grammars`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mosaic.format.errors import InputError
from mosaic.runtime.text.lark import json_of
from mosaic.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

MESSAGE = 200  # characters of what llguidance has to say


class Grammars:
    """Makes masks for one vocabulary. To be kept: for a large one, making this takes a second, a mask milliseconds."""

    def __init__(self, tokenizer: Tokenizer, stop: frozenset[int]) -> None:
        """`stop`: the tokens that end an answer, and are allowed only where it may end."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise InputError(
                "answers of a given form need llguidance", found=error, remedy="pip install 'mosaic-moe[serve]'"
            ) from error
        self._tokenizer = tokenizer
        ends = sorted(token for token in stop if token < tokenizer.num_tokens)
        if not ends:
            raise InputError(
                "answers of a given form need a stop token",
                found="no eos_token_id",
                expected="the token that ends an answer",
                remedy="name it in the model's generation_config.json",
            )
        self._library = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, ends)), eos_token=ends)

    def json_schema(self, schema: Mapping[str, Any]) -> "GrammarMask":
        """JSON that is valid for the schema. InputError for a schema that is wrong or that cannot be enforced."""
        try:
            text = json_of(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused("the JSON schema", error) from error
        return self._mask(_from_lark(f"start: {text}\n"), "the JSON schema")

    def lark(self, text: str) -> "GrammarMask":
        """What a grammar in llguidance's variant of Lark describes. InputError for one that is wrong."""
        return self._mask(_from_lark(text), "the grammar")

    def _mask(self, grammar: str, what: str) -> "GrammarMask":
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._library, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        mask = GrammarMask(matcher, what, self._tokenizer.num_tokens)
        mask.allowed()  # what nothing can satisfy is refused here, not in the middle of an answer
        return mask


def _from_lark(text: str) -> str:
    """As the library takes it."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


class GrammarMask:
    """A `TokenMask`: the tokens with which an answer of the grammar can go on; stop tokens where it is complete."""

    def __init__(self, matcher: "LLMatcher", what: str, num_tokens: int) -> None:
        self._matcher = matcher
        self._what = what
        self._num_tokens = num_tokens

    def allowed(self) -> NDArray[np.bool_]:
        """[num_tokens]. InputError if the grammar has grown beyond what llguidance will follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._num_tokens, bitorder="little").view(np.bool_)

    def advance(self, token: int) -> None:
        """A token came. InputError if the grammar does not have it here."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refused(self._what, self._matcher.get_error())


class _Vocabulary:
    """The tokens as llguidance wants to see them: an object with these names that encodes when it is called."""

    def __init__(self, tokenizer: Tokenizer, stop: list[int]) -> None:
        self._tokenizer = tokenizer
        # A stop token is never text, whatever its bytes.
        self.tokens = [b"" if n in stop else tokenizer.token_bytes(n) for n in range(tokenizer.num_tokens)]
        self.special_token_ids = [number for number, token in enumerate(self.tokens) if not token]
        self.eos_token_id = stop[0]
        self.bos_token_id = None
        self._single = {token[0]: number for number, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """The tokens that write a text which the grammar leaves no choice about: the model's own, if they are exact.

        They are not where the tokenizer normalises or finds a special token; then a token for each byte.
        """
        found = self._tokenizer.encode(text.decode())
        exact = b"".join(self.tokens[number] for number in found) == text
        return found if exact else [self._single[byte] for byte in text if byte in self._single]


def _refused(what: str, error: object) -> InputError:
    said = " ".join(str(error).partition("<backtrace>")[0].split())
    return InputError(
        f"{what} cannot be followed",
        found=said[:MESSAGE],
        expected="what llguidance can enforce",
        remedy="correct or simplify it",
    )

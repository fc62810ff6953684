"""Text to token ids and back, through the `tokenizers` library; decoding is incremental and exact at byte level."""

import codecs
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Tokenizer as Library

from mosaic.format.errors import InputError

TOKENIZER_FILE = "tokenizer.json"
#: How much shorter normalisation may make a text in UTF-8. NFC: the three parts of a Korean syllable, 9 bytes, are 3.
SHRINKS = {None: 1, "NFC": 3}


class TooLongError(InputError):
    """A text that is certain to have more tokens than it may have, without being tokenised."""


class Tokenizer:
    """A byte-level BPE tokenizer of a model directory."""

    def __init__(self, folder: Path) -> None:
        file = folder / TOKENIZER_FILE
        if not file.is_file():
            raise InputError(
                "the model directory has no tokenizer",
                file=file,
                found="nothing",
                expected=TOKENIZER_FILE,
                remedy="copy it from the checkpoint the model was converted from",
            )
        try:
            self._library = Library.from_file(str(file))
            parts = json.loads(file.read_text(encoding="utf-8"))
            decoder, normalizer = ((parts.get(name) or {}).get("type") for name in ("decoder", "normalizer"))
        except Exception as error:
            raise InputError("not a tokenizer", file=file, found=error, remedy="copy it again") from error
        if decoder != "ByteLevel":
            raise InputError(
                "this kind of tokenizer is not supported",
                file=file,
                found=f"decoder {decoder}",
                expected="a byte-level BPE tokenizer (decoder ByteLevel)",
                remedy="use the tokenizer.json of the model's own checkpoint",
            )
        self._library.no_truncation()  # training-time settings that some files carry
        self._library.no_padding()
        added = self._library.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        #: One more than the highest token id; rows of the head above are padding.
        self.num_tokens = max(vocabulary.values()) + 1
        self._special = {n for n, token in added.items() if token.special}
        self._most_bytes: int | None = None  # of a text, that one token can stand for; None: there is no saying
        if normalizer in SHRINKS and not any(token.lstrip or token.rstrip for token in added.values()):
            written = (*map(len, vocabulary), *(len(text.encode()) for text in self._added.values()))
            self._most_bytes = max(written) * SHRINKS[normalizer]

    def encode(self, text: str, at_most: int | None = None) -> list[int]:
        """Token ids; special tokens in the text are recognised, none are added.

        TooLongError, at once, for a text that is so long that it has more than `at_most`; others may have more, too.
        """
        nbytes = len(text.encode(errors="surrogatepass"))
        if at_most is not None and self._most_bytes and nbytes > at_most * self._most_bytes:
            raise TooLongError(
                "the text is too long", found=f"{nbytes:,} bytes", expected=f"at most {at_most:,} tokens",
                remedy="shorten it",
            )  # fmt: skip
        try:
            # The one that lets other threads run meanwhile, and keeps no offsets.
            return list(self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except TypeError as error:  # what the library says to a lone surrogate, Python's stand-in for a stray byte
            raise InputError(
                "the text is not UTF-8", found=ascii(text)[:60], expected="UTF-8", remedy="convert the text first"
            ) from error

    def is_added(self, number: int) -> bool:
        """Whether a token was added to the vocabulary for a purpose of its own: its text is never divided."""
        return number in self._added

    def same_vocabulary(self, other: "Tokenizer") -> bool:
        """Whether every token id stands for the same in both."""
        one, two = (library.get_vocab(with_added_tokens=True) for library in (self._library, other._library))
        return bool(one == two)

    def token_bytes(self, number: int) -> bytes:
        """The bytes a token stands for; special tokens stand for nothing."""
        return b"" if number in self._special else self.written(number)

    def written(self, number: int) -> bytes:
        """The bytes of a text that a token is read from: the same, but special tokens have a name."""
        if number in self._added:
            return self._added[number].encode()
        token = self._library.id_to_token(number)
        if token is None:
            return b""
        if all(character in _BYTE for character in token):
            return bytes(_BYTE[character] for character in token)
        return token.encode()  # not in the byte alphabet: stands for itself, as in the library

    def shown(self, number: int) -> str:
        """A token in a list of tokens: special ones by name, bytes that are no whole characters by their numbers."""
        return self._added.get(number) or self.token_bytes(number).decode(errors="backslashreplace")

    def decode(self, numbers: Iterable[int], *, special: bool = False) -> str:
        """All of a text at once; `special`: with the special tokens' names."""
        stream = self.stream(special=special)
        return "".join(stream.push(number) for number in numbers) + stream.finish()

    def stream(self, *, special: bool = False) -> "TextStream":
        """A decoder for tokens that arrive one at a time; `special`: with the special tokens' names."""
        return TextStream(self.written if special else self.token_bytes)


class TextStream:
    """Turns tokens into text as they come; a character split over tokens waits until it is whole."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, number: int) -> str:
        """The text that one more token completes."""
        return self._decoder.decode(self._bytes_of(number))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)


def _byte_of_character() -> dict[str, int]:
    """Inverse of the byte-level alphabet: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + position): byte for position, byte in enumerate(others)}


_BYTE = _byte_of_character()

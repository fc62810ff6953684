"""Log-probabilities in the two forms the API has: chat completions' and the older one of completions."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mosaic.runtime.sampler import Chosen
from mosaic.runtime.tokenizer import TextStream, Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON has not
PART = 64  # tokens of a prompt that are told of at a time: so many are no burden for the event loop

Scores = dict[str, list[Any]]


def chat_logprobs(tokenizer: Tokenizer, chosen: Iterable[Chosen]) -> dict[str, Any]:
    """Of chat completions: a list of tokens, each with its likeliest alternatives."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelled = list(tokenizer.token_bytes(token))
        return {"token": tokenizer.shown(token), "logprob": max(logprob, LEAST), "bytes": spelled}

    content = []
    for each in chosen:
        top = [entry(*alternative) for alternative in each.top]
        content.append(entry(each.token, _logprob(each)) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Of completions: four lists. Keeps count of the characters of the text, for `text_offset`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = tokenizer.stream()
        self._offset = 0

    def of(self, chosen: Sequence[Chosen]) -> Scores:
        """The next tokens of an answer."""
        return self._of(self._text, [each.token for each in chosen], chosen)

    def of_prompt(self, text: str, tokens: Sequence[int], scores: Sequence[Chosen | None]) -> Iterator[Scores]:
        """The tokens of a prompt before the answer, PART at a time; its text shows special tokens, too."""
        stream = self._tokenizer.stream(special=True)
        for first in range(0, len(tokens), PART):
            yield self._of(stream, tokens[first : first + PART], scores[first : first + PART])
        self._offset = len(text)  # which may have been normalised to tokens of fewer characters

    def _of(self, text: TextStream, tokens: Sequence[int], chosen: Sequence[Chosen | None]) -> Scores:
        """None for a token of which nothing is known, as the first of a prompt."""
        found: Scores = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, each in zip(tokens, chosen, strict=True):
            found["tokens"].append(self._tokenizer.shown(token))
            found["text_offset"].append(self._offset)
            self._offset += len(text.push(token))
            found["token_logprobs"].append(None if each is None else _logprob(each))
            found["top_logprobs"].append(None if each is None else self._top(each))
        return found

    def _top(self, chosen: Chosen) -> dict[str, float]:
        """By text, so of several tokens that read the same the likeliest; the chosen one is always there."""
        found: dict[str, float] = {}
        for token, logprob in (*chosen.top, (chosen.token, _logprob(chosen))):
            found.setdefault(self._tokenizer.shown(token), max(logprob, LEAST))
        return found


def _logprob(chosen: Chosen) -> float:
    assert chosen.logprob is not None  # it was asked for
    return max(chosen.logprob, LEAST)

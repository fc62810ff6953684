"""Choices as they advance, with a worker that is ahead of whoever reads them."""

import asyncio
import subprocess
import sys

import pytest

from mosaic.runtime.request import FinishReason, Generation, Request
from mosaic.runtime.sampler import Chosen
from mosaic.runtime.sampling import Sampling
from mosaic.runtime.serve.answers import Choice, answers, together
from mosaic.runtime.serve.metrics import Metrics
from mosaic.runtime.serve.tally import Tally
from mosaic.runtime.text.reply import ReplyReader
from support.tiny_tokenizer import IM_END


class Ahead:
    """A worker, and its ticket: the generation is over before its first token is read."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    async def submit(self, request: Request) -> "Ahead":
        self.generation = Generation(request)
        self.generation.ended_by = Chosen(IM_END)
        self.generation.finish(FinishReason.STOP_TOKEN)
        return self

    async def __aiter__(self):
        yield [Chosen(token) for token in self._text]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("stop", "ended_by"), [(["o"], None), (["?"], Chosen(IM_END))])
def test_a_stop_token_after_a_stop_string_is_not_the_answers(engine, stop, ended_by):
    choice = Choice(Request([1], Sampling()), ReplyReader(engine.tokenizer, stop=stop))
    tally = Tally()
    [delta] = asyncio.run(together(answers(Ahead(b"Hello"), [choice], 1, tally, Metrics(lambda: None))))
    assert delta.ended_by == ended_by
    assert "".join(piece.text for piece in delta.pieces) == ("Hello" if ended_by else "Hell")
    assert delta.finish_reason == tally.finish_reason == "stop"


def test_what_is_checked_is_checked_without_assertions():
    code = """
from mosaic.runtime.serve.errors import ApiError
from mosaic.runtime.serve.worker import Worker
try:
    Worker(lambda: None).check()
except ApiError as error:
    print(error.status)
"""
    assert subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True).stdout == "503\n"

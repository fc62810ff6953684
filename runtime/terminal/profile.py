"""Where the time of an answer went, operation by operation: what --profile prints."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mosaic.runtime.ops.profiled import ProfiledOps

CEILING_SECONDS = 0.5  # of measuring what the memory gives


class Profile:
    """Of one answer: the prompt and the tokens after it apart."""

    def __init__(self, ops: "ProfiledOps") -> None:
        self._ops = ops
        self._prompt: list[str] = []
        ops.reset()

    def prompt_read(self) -> None:
        """The prompt is read; told again, this does nothing."""
        if not self._prompt:
            self._prompt = ["prompt", *self._ops.table(self._ops.elapsed), ""]
            self._ops.reset()

    def lines(self, decoded: int) -> list[str]:
        """After the answer, for which the model ran so many times."""
        from mosaic.runtime.machine import read_ceiling
        from mosaic.runtime.ops.cpu import threads

        self.prompt_read()
        elapsed = self._ops.elapsed
        table = self._ops.table(elapsed, read_ceiling(CEILING_SECONDS, threads()))
        return [*self._prompt, f"answer, {decoded} tokens", *table]

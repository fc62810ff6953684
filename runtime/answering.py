"""One answer, from a request to pieces of text: drives the scheduler and reads the tokens, in one thread."""

import weakref
from collections.abc import Callable, Iterator

from mosaic.runtime.request import FinishReason, Generation, Request
from mosaic.runtime.sampler import Chosen
from mosaic.runtime.scheduler import Scheduler
from mosaic.runtime.text.reply import Piece, ReplyReader


class Answering:
    """To be iterated once. `after_step` is told of the generation after every step of the scheduler.

    Closing the iterator early cancels the request. InputError if the model cannot go on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        request: Request,
        reader: ReplyReader,
        after_step: Callable[[Generation], object] = lambda generation: None,
    ) -> None:
        self._scheduler = scheduler
        self._reader = reader
        self._after_step = after_step
        self.generation = scheduler.submit(request)
        never_read = weakref.finalize(self, scheduler.withdraw, self.generation)
        never_read.atexit = False
        self.chosen: list[Chosen] = []

    def __iter__(self) -> Iterator[Piece]:
        """Pieces of the reply, each as soon as it is certain."""
        generation, reader = self.generation, self._reader
        try:
            while True:
                over = generation.finish_reason  # others that are iterated step, too, and may have ended it
                for chosen in generation.take():
                    self.chosen.append(chosen)
                    yield from reader.push(chosen.token)
                    if reader.stopped:
                        self._scheduler.cancel(generation, FinishReason.STOP_STRING)
                        over = generation.finish_reason
                        break
                if over:
                    break
                self._scheduler.step()
                self._after_step(generation)
            yield from reader.finish()
            if generation.error:
                raise generation.error
        finally:
            self._scheduler.cancel(generation)

"""HTTP/1.1 by uvicorn and h11, with an end to its patience: uvicorn waits for ever for a header, or for a reader."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class ImpatientProtocol(H11Protocol):
    """Looks at a connection once in `patience` seconds, and ends it if nothing has moved since the last time.

    Moved: a request has begun, or the client has taken some of what was written for it. A request that is being worked
    on may take as long as it likes.
    """

    patience = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch."""
        super().connection_made(transport)
        self._seen: tuple[object, int] = (None, 0)  # the request, and what is not taken of the answers
        self._watch = self.loop.call_later(self.patience, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Watch no longer."""
        self._watch.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        last_cycle, last_unsent = self._seen
        unsent = self.transport.get_write_buffer_size()
        idle = self.cycle is None or self.cycle.response_complete
        if unsent == last_unsent if unsent else idle and self.cycle is last_cycle:
            self.transport.abort()
            return
        self._seen = (self.cycle, unsent)
        self._watch = self.loop.call_later(self.patience, self._look)

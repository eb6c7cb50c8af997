"""Bound what the connections to a server take: how many are open, and how long they send nothing.

uvicorn waits for ever for the first request of a connection, and for the rest of a body.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

try:
    import resource

    _FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
except ImportError:  # not on Windows
    _FILES = 512
_RESERVED = 64  # files that the server needs for itself
_MOST = 4096  # connections; also where files have no limit, which is -1
_HEAD, _BODY = 15.0, 60.0  # seconds for a request's head, and for its body


class BoundedConnections(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that is closed if its request does not come, or if there are too many.

    One too many takes the place of the one that has waited longest for a request.

    Attributes:
        most: connections that may be open.
        head, body: seconds for a request's head, and for its body.
    """

    most = _MOST if _FILES < 0 else max(1, min(_MOST, _FILES - _RESERVED))
    head, body = _HEAD, _BODY
    _told = False

    def connection_made(self, transport: Any) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for: str | None = None
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.most:
            self._make_room()

    def _make_room(self) -> None:
        waiting = [each for each in self.connections if each._waits_for is not None]
        oldest = min(waiting, key=lambda each: each._timer.when())
        self.connections.discard(oldest)
        oldest.transport.abort()
        if not BoundedConnections._told:
            BoundedConnections._told = True
            logging.getLogger("uvicorn.error").warning(
                "%d connections are open, and no more may be: those that wait longest for a "
                "request are closed",
                self.most,
            )

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        """Give what the client has to send its time, once."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            waits_for: str | None = "head"
        else:
            waits_for = "body" if cycle.more_body else None
        if waits_for == self._waits_for or self.transport.is_closing():
            return
        self._stop()
        if waits_for is not None:
            self._timer = self.loop.call_later(getattr(self, waits_for), self.transport.close)
        self._waits_for = waits_for

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._waits_for = None

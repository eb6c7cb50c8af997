"""Bound what connections to a server take, which uvicorn does not, and whom it answers."""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
from collections.abc import Callable, Collection
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kvtool.engines.requests import Refused
from kvtool.errors import quote

try:
    import resource

    _FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
except ImportError:  # not on Windows
    _FILES = 512
BACKLOG = 100  # connections that may be accepted before any of them is looked at
_RESERVED = 64 + BACKLOG  # files that the server needs for itself
_MOST = 4096  # connections; also where files have no limit, which is -1
_HEAD, _BODY = 15.0, 60.0  # seconds for a request's head, and for its body


@functools.cache
def _say_full(most: int) -> None:
    """Write one line, the first time."""
    logging.getLogger("uvicorn.error").warning(
        "%d connections are open, and no more may be: those that wait longest for a request are "
        "closed",
        most,
    )


class BoundedConnections(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that ends if no request comes; one above `most` ends the longest wait."""

    most = _MOST if _FILES < 0 else max(16, min(_MOST, _FILES - _RESERVED))
    head, body = _HEAD, _BODY
    _timer: asyncio.TimerHandle | None = None
    _waits_for: str | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.most:
            self._make_room()

    def _make_room(self) -> None:
        waiting = [each for each in self.connections if each._waits_for is not None]
        oldest = min(waiting, key=lambda each: each._timer.when())
        self.connections.discard(oldest)
        oldest.transport.abort()
        _say_full(self.most)

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


def guarded(
    app: Callable[..., Any],
    key: str | None,
    hosts: Collection[str] | None,
    answer: Callable[[Exception], Callable[..., Any]],
) -> Callable[..., Any]:
    """Ask for a key and look at the host before anything is read; `/health` needs no key.

    A web page may rebind its name to this machine; a server of any name would be of its origin.
    """

    def refusal(scope: Any) -> Refused | None:
        given = dict(scope["headers"])
        if hosts is not None and _host(given.get(b"host", b"")) not in hosts:
            said = given.get(b"host", b"").decode("latin-1")
            return Refused(f"this server does not answer to the host {quote(said)}", status=403)
        if key is None or scope["path"] == "/health":
            return None
        if hmac.compare_digest(given.get(b"authorization", b""), b"Bearer " + key.encode()):
            return None
        return Refused("no valid API key is given", status=401, code="invalid_api_key")

    async def look(scope: Any, receive: Any, send: Any) -> None:
        refused = refusal(scope) if scope["type"] == "http" else None
        await (app if refused is None else answer(refused))(scope, receive, send)

    return look


def _host(header: bytes) -> str:
    """Return the name in a header `Host`, without its port."""
    name, colon, port = header.decode("latin-1").lower().rpartition(":")
    return name if colon and port.isdigit() else header.decode("latin-1").lower()

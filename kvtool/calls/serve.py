"""Serve a model under a KV budget to OpenAI clients: all that is checked before it is loaded."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvtool.calls.fitting import for_requests
from kvtool.calls.request import Request, choose_policy, read_prefill, spell_budget
from kvtool.calls.resolve import resolve_settings
from kvtool.calls.serve_settings import ServeSettings
from kvtool.errors import KvtoolError, UsageError, quote
from kvtool.extras import require
from kvtool.policies.grammar import listed_policies, parse_policy
from kvtool.processes import check_alone
from kvtool.transformers_versions import check_transformers
from kvtool.watcher import Watcher


@dataclass(frozen=True)
class ServeRun:
    """A server that is all checked, as far as that goes without the model.

    Attributes:
        allowed: policies that a request may choose, as they are spelled.
    """

    settings: ServeSettings
    request: Request
    allowed: list[str]

    def describe(self) -> dict[str, Any]:
        """Return what a dry run prints."""
        settings, request = self.settings, self.request
        return {
            "model": settings.model,
            "policy": str(request.policy),
            "budget": spell_budget(request.budget),
            "prefill": request.prefill,
            "cache": settings.cache,
            "host": settings.host,
            "port": settings.port,
            "api_key": settings.key is not None,
            "allow_policies": self.allowed,
            "memory_bytes": settings.memory_bytes,
            "rows": settings.rows,
            "max_new_tokens": settings.new_tokens,
            "prefill_chunk": settings.prefill_chunk,
            "longest_prompt": settings.longest,
            "longest_answer": settings.longest_answer_tokens,
            "drain": settings.drain,
        }

    def run(self, watcher: Watcher, on_ready: Callable[[str, Callable[[], None]], object]) -> None:
        """Load the model and serve until a signal ends it.

        Args:
            on_ready: called with the address once it listens, and with what ends the server.

        Raises:
            KvtoolError: the address is taken.
        """
        settings, source = self.settings, self.settings.source()
        watcher.note_any(source.note())
        with _listen(settings.host, settings.port) as listening:
            if not settings.is_loopback and settings.key is None:
                watcher.note(
                    f"note: whoever reaches {settings.host} may ask; --api-key lets in only some"
                )
            with source.attached(note=watcher.note, progress=watcher.shows_progress) as loaded:
                from kvtool.calls.serve_loaded import LoadedServer

                server = LoadedServer(settings, self.request, self.allowed, loaded)
                server.serve(listening, watcher, on_ready)


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """Listen before the model is loaded, so that a port that is taken is known at once."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, number)
    except OSError as error:
        raise UsageError(f"--host {quote(host)}: {error.strerror}") from None
    with listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError as error:
            raise KvtoolError(
                f"{host}:{port} cannot be listened to: {error.strerror}", hint="another --port"
            ) from None
        yield listening


def prepare_serve(settings: ServeSettings, watcher: Watcher) -> ServeRun:
    """Check everything that can be checked before the model is loaded.

    Raises:
        UsageError: settings that are wrong or do not go together; an extra is not installed.
    """
    settings, plan = resolve_settings(settings, "kvtool serve")
    require("serve", needed_by="kvtool serve")
    check_transformers()
    check_alone("serve")
    settings.source().check(config_only=settings.dry_run)
    allowed = _allowed(settings.allow_policies)
    quiet = settings.cache and settings.policy is None  # a cached text brings its own policy
    policy, budget = choose_policy(settings, plan, Watcher() if quiet else watcher)
    prefill = read_prefill(settings, policy)
    request = Request(None, "requests", policy, budget, prefill, plan)
    if settings.chooses:
        request = for_requests(settings, request, watcher)
    return ServeRun(settings, request, allowed)


def _allowed(text: str | None) -> list[str]:
    if text is None:
        return []
    return [str(parse_policy(each)) for each in listed_policies(text) or [text]]

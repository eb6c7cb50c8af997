"""Serve a model under a KV budget to OpenAI clients."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.prompts import room_for_rows, row_bytes
from kvtool.calls.request import Request, choose_policy, read_prefill, spell_budget
from kvtool.calls.resolve import resolve_settings
from kvtool.calls.serve_settings import ServeSettings
from kvtool.errors import KvtoolError, UsageError, quote
from kvtool.extras import require
from kvtool.model_shape import trained_length
from kvtool.policies.grammar import listed_policies, parse_policy
from kvtool.processes import check_alone
from kvtool.sizes import Budget, bytes_in_words
from kvtool.transformers_versions import check_transformers
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.cache.whole.cache import KVCache
    from kvtool.engines.offers import Offer
    from kvtool.engines.requests import Choice
    from kvtool.engines.server import Served
    from kvtool.models.load import Loaded
    from kvtool.policies.policy import Policy

_SUFFIXES = (".safetensors", ".kv")


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
            "max_new_tokens": settings.new_tokens,
            "longest_prompt": settings.longest,
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
                served = self._serve(loaded, watcher)
                try:
                    _run(served, settings, listening, on_ready)
                finally:
                    served.answers.stop()

    def _serve(self, loaded: Loaded, watcher: Watcher) -> Served:
        from kvtool.engines.offers import Opener
        from kvtool.engines.server import Served
        from kvtool.generation.answering_thread import LiveAnswers
        from kvtool.generation.model_settings import check_drawing, drawing_settings

        settings, model = self.settings, loaded.model
        check_drawing(model, loaded.tokenizer, drawing_settings(model, 1, 0.0, 0))
        longest = settings.longest or trained_length(model.config)
        offers, also = self._offers(loaded)
        memory, most = self._room(loaded, list(offers.values()), watcher)
        answers = LiveAnswers(model, loaded.tokenizer, memory=memory, most_sequences=most)
        choose, opener = partial(self._choose, loaded), Opener(loaded, longest)
        new = settings.new_tokens
        return Served(loaded, offers, also, choose, opener, answers, settings.key, new)

    def _room(
        self, loaded: Loaded, offers: list[Offer], watcher: Watcher
    ) -> tuple[int | None, int | None]:
        """Return how many bytes requests and conversations may take, and how many requests.

        Raises:
            UsageError: the texts that conversations start from take all of the memory.
        """
        settings = self.settings
        books = {id(offer.base): offer.base_bytes for offer in offers if offer.base is not None}
        held = sum(books.values())
        if books:
            texts = "1 cached text" if len(books) == 1 else f"{len(books)} cached texts"
            watcher.note(f"memory: {bytes_in_words(held)} for {texts}")
        memory, most = room_for_rows(settings.memory_bytes, settings.device_map, loaded.model)
        if memory is None or settings.memory_bytes is None:  # what is free is free beside them
            return memory, most
        if held >= memory:
            raise UsageError(
                f"the cache files take {held} bytes, and --memory is {memory}",
                hint="a larger --memory, or fewer files",
            )
        return memory - held, most

    def _offers(self, loaded: Loaded) -> tuple[dict[str, Offer], dict[str, str]]:
        """Return what is offered, by the names of models, and other names for it."""
        books = {}
        for path in self.settings.cache_paths:
            name, offer = _book(path, loaded, self.request.prefill)
            if name in books:
                raise UsageError(
                    f"two cache files would have the name `{name}`", hint="rename one of them"
                )
            books[name] = offer
        plain = make_offer(loaded, self.request, loaded.name)
        if len(books) == 1:
            (only,) = books.values()
            if self.settings.policy is not None and only.policy != str(self.request.policy):
                raise UsageError(
                    f"cache `{self.settings.cache[0]}` was made with policy `{only.policy}`, not "
                    f"`{self.request.policy}`",
                    hint="leave out --policy",
                )
            plain = replace(only, name=loaded.name)
        also = {f"{loaded.name}@main": loaded.name}
        for name in books:
            stem = name.partition("@")[0]
            if sum(other.partition("@")[0] == stem for other in books) == 1:
                also[stem] = name
        return {loaded.name: plain, **books}, also

    def _choose(self, loaded: Loaded, offer: Offer, choice: Choice) -> Offer:
        """Return an offer of the policy and budget that a request chooses.

        Raises:
            Refused, UsageError: they are not allowed, or make no sense.
        """
        from kvtool.engines.requests import Refused

        if offer.base is not None:
            raise Refused(f"`{offer.name}` goes on by the policy that its text was read with")
        policy = self.request.policy
        if choice.policy is not None:  # no module is imported that only a request names
            policy = parse_policy(choice.policy, imports=False)
        if str(policy) not in self.allowed:
            listed = ", ".join(self.allowed) or "no policy (--allow-policies)"
            raise Refused(f"policy {quote(policy)} is not allowed; this server allows {listed}")
        budget = None
        if policy.takes_budget:
            budget = _budget(policy, choice.budget, self.request.budget)
        asked = replace(self.request, policy=policy, budget=budget, plan=None)
        return make_offer(loaded, asked, offer.name)


def _budget(policy: Policy, chosen: int | str | None, otherwise: Budget | None) -> Budget:
    budget = otherwise if chosen is None else Budget.parse(chosen)
    if budget is None or budget.share is not None:
        raise UsageError(f"policy `{policy}` takes a budget in tokens or bytes, got {budget}")
    if budget.tokens is not None:
        policy.check_budget(budget.tokens)
    return budget


def make_offer(loaded: Loaded, request: Request, name: str, base: KVCache | None = None) -> Offer:
    """Return what is offered under a name.

    Args:
        base: the text before.
    """
    from kvtool.engines.offers import Offer

    budget = request.budget
    planned = " as planned" if request.plan is not None else ""
    return Offer(
        name,
        str(request.policy),
        None if budget is None else f"{budget}{planned}",
        lambda: request.new_cache(loaded.model),
        lambda tokens: request.check_length(tokens, Watcher()),
        lambda tokens, new: row_bytes(request, loaded, tokens, new),
        base,
    )


def _book(path: Path, loaded: Loaded, prefill: str) -> tuple[str, Offer]:
    """Read a text that conversations start from; its name is that of the file and the policy."""
    from kvtool.cache.files.load import load_cache

    cache = load_cache(path, loaded.model)
    if cache.first_layer.batch_size > 1:
        raise UsageError(f"cache file `{path}` holds several texts")
    stem = path.name
    for suffix in _SUFFIXES:
        stem = stem.removesuffix(suffix)
    request = Request(None, str(path), cache.policy, cache.budget, prefill)
    name = f"{stem}@{cache.policy}"
    return name, make_offer(loaded, request, name, cache)


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


def _run(
    served: Served,
    settings: ServeSettings,
    listening: socket.socket,
    on_ready: Callable[[str, Callable[[], None]], object],
) -> None:
    import uvicorn

    from kvtool.engines.server import make_app

    config = uvicorn.Config(
        make_app(served),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=settings.drain,
        server_header=False,
    )
    server = uvicorn.Server(config)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    def end() -> None:
        server.handle_exit(signal.SIGTERM, None)

    async def main() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            on_ready(f"http://{shown}:{port}/v1", end)
        await serving

    with _quiet_end():
        asyncio.run(main())


@contextlib.contextmanager
def _quiet_end() -> Iterator[None]:
    """Let SIGTERM be all done once uvicorn has ended, which hands it on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def prepare_serve(settings: ServeSettings, watcher: Watcher) -> ServeRun:
    """Check everything that can be checked before the model is loaded.

    Raises:
        UsageError: settings that are wrong or do not go together; an extra is not installed.
    """
    settings, plan = resolve_settings(settings, "kvtool serve")
    require("serve", needed_by="kvtool serve")
    check_transformers()
    check_alone("serve")
    settings.source().check()
    allowed = _allowed(settings.allow_policies)
    quiet = settings.cache and settings.policy is None  # a cached text brings its own policy
    policy, budget = choose_policy(settings, plan, Watcher() if quiet else watcher)
    prefill = read_prefill(settings.prefill)
    return ServeRun(settings, Request(None, "requests", policy, budget, prefill, plan), allowed)


def _allowed(text: str | None) -> list[str]:
    if text is None:
        return []
    return [str(parse_policy(each)) for each in listed_policies(text) or [text]]

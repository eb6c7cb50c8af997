"""Serve a loaded model: what is offered under which name, and what requests may choose."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn

from kvtool.cache.files.load import load_cache
from kvtool.cache.whole.cache import KVCache
from kvtool.calls.request import Request, room_for_rows
from kvtool.calls.serve_settings import ServeSettings
from kvtool.engines.connections import BACKLOG, BoundedConnections
from kvtool.engines.offers import Offer, Opener
from kvtool.engines.requests import Choice, Refused
from kvtool.engines.server import Served, make_app
from kvtool.errors import UsageError, quote
from kvtool.generation.answering_thread import LiveAnswers
from kvtool.generation.model_settings import check_drawing, drawing_settings
from kvtool.model_shape import trained_length
from kvtool.models.load import Loaded
from kvtool.policies.grammar import parse_policy
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget, bytes_in_words
from kvtool.watcher import Watcher

_LAST_WORDS = 2  # seconds in which clients hear that the server ends
_SUFFIXES = (".safetensors", ".kv")


@dataclass(frozen=True)
class LoadedServer:
    """A server whose model is loaded.

    Attributes:
        allowed: policies that a request may choose, as they are spelled.
    """

    settings: ServeSettings
    request: Request
    allowed: list[str]
    loaded: Loaded

    def serve(
        self,
        listening: socket.socket,
        watcher: Watcher,
        on_ready: Callable[[str, Callable[[], None]], object],
    ) -> None:
        """Answer until a signal ends it; `on_ready` as for `ServeRun.run`."""
        settings, loaded = self.settings, self.loaded
        model = loaded.model
        check_drawing(model, loaded.tokenizer, drawing_settings(model, 1, 0.0, 0))
        trained = trained_length(model.config)
        opener = Opener(loaded, settings.longest or trained)
        offers, also = self._offers()
        memory, most = self._room(list(offers.values()), watcher)
        if any(parse_policy(offer.policy).codec is not None for offer in offers.values()):
            watcher.note("note: prompts are read at once, as the codec asks; other answers wait")
        limits = {"memory": memory, "most_sequences": most, "piece": settings.prefill_chunk}
        answers = LiveAnswers(model, loaded.tokenizer, **limits, graphs=settings.graphs)
        key, new, hosts = settings.key, settings.new_tokens, settings.hosts
        answer = settings.longest_answer_tokens or trained
        choose = self._choose
        served = Served(loaded, offers, also, choose, opener, answers, key, new, answer, hosts)
        try:
            _run(served, settings.drain, listening, on_ready, watcher.note)
        finally:
            answers.stop()

    def _room(self, offers: list[Offer], watcher: Watcher) -> tuple[int | None, int | None]:
        """Return how many bytes requests and conversations may take, and how many requests."""
        settings = self.settings
        books = {id(offer.base): offer.base_bytes for offer in offers if offer.base is not None}
        held = sum(books.values())
        if books:
            texts = "1 cached text" if len(books) == 1 else f"{len(books)} cached texts"
            watcher.note(f"memory: {bytes_in_words(held)} for {texts}")
        memory, most = room_for_rows(settings.memory_bytes, self.loaded.model)
        most = settings.rows or most
        if memory is None or settings.memory_bytes is None:  # what is free is free beside them
            return memory, most
        if held >= memory:
            raise UsageError(
                f"the cache files take {held} bytes, and --memory is {memory}",
                hint="a larger --memory, or fewer files",
            )
        return memory - held, most

    def _offers(self) -> tuple[dict[str, Offer], dict[str, str]]:
        """Return what is offered, by the names of models, and other names for it."""
        books: dict[str, Offer] = {}
        for path in self.settings.cache_paths:
            offer = self._book(path)
            name = offer.name
            if name in books:
                raise UsageError(
                    f"two cache files would have the name `{name}`", hint="rename one of them"
                )
            books[name] = offer
        main = self.loaded.name
        plain = self._offer(self.request, main)
        if len(books) == 1:
            (only,) = books.values()
            if self.settings.policy is not None and only.policy != str(self.request.policy):
                raise UsageError(
                    f"cache `{self.settings.cache[0]}` was made with policy `{only.policy}`, not "
                    f"`{self.request.policy}`",
                    hint="leave out --policy",
                )
            plain = replace(only, name=main)
        also = {f"{main}@main": main}
        for name in books:
            stem = name.partition("@")[0]
            if sum(other.partition("@")[0] == stem for other in books) == 1:
                also[stem] = name
        return {main: plain, **books}, also

    def _book(self, path: Path) -> Offer:
        """Read a text that conversations start from; its name is that of the file and policy."""
        cache = load_cache(path, self.loaded.model)
        if cache.first_layer.batch_size > 1:
            raise UsageError(f"cache file `{path}` holds several texts")
        stem = path.name
        for suffix in _SUFFIXES:
            stem = stem.removesuffix(suffix)
        request = Request(None, str(path), cache.policy, cache.budget, self.request.prefill)
        return self._offer(request, f"{stem}@{cache.policy}", cache)

    def _offer(self, request: Request, name: str, base: KVCache | None = None) -> Offer:
        """Return what is offered under a name; `base` is the text before."""
        loaded, budget = self.loaded, request.budget
        planned = " as planned" if request.plan is not None else ""
        return Offer(
            name,
            str(request.policy),
            None if budget is None else f"{budget}{planned}",
            lambda: request.new_cache(loaded.model),
            lambda tokens: request.check_length(tokens, Watcher()),
            lambda tokens, new: request.row_bytes(loaded, tokens, new),
            base,
        )

    def _choose(self, offer: Offer, choice: Choice) -> Offer:
        """Return an offer of the policy and budget that a request chooses."""
        if offer.base is not None:
            raise UsageError(f"`{offer.name}` goes on by the policy that its text was read with")
        policy = self.request.policy
        chosen = choice.policy or str(policy)
        outside = ":" in chosen  # a class: which ones are imported is no client's concern
        if choice.policy is not None and not (outside and chosen not in self.allowed):
            policy = parse_policy(chosen, imports=False)
            chosen = str(policy)
        if chosen not in self.allowed:
            listed = ", ".join(self.allowed) or "no choice of policies"
            raise UsageError(f"policy {quote(chosen)} is not allowed; this server allows {listed}")
        budget = None
        if policy.takes_budget:
            budget = _budget(policy, choice.budget, self.request.budget)
        asked = replace(self.request, policy=policy, budget=budget, plan=None)
        return self._offer(asked, offer.name)


def _budget(policy: Policy, chosen: int | str | None, otherwise: Budget | None) -> Budget:
    budget = otherwise if chosen is None else Budget.parse(chosen)
    if budget is None or budget.share is not None:
        raise UsageError(f"policy `{policy}` takes a budget in tokens or bytes, got {budget}")
    if budget.tokens is not None:
        policy.check_budget(budget.tokens)
    return budget


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit = self.should_exit  # the second signal ends at once
        super().handle_exit(sig, frame)


def _run(
    served: Served,
    drain: int,
    listening: socket.socket,
    on_ready: Callable[[str, Callable[[], None]], object],
    note: Callable[[str], object],
) -> None:
    config = uvicorn.Config(
        make_app(served),
        http=BoundedConnections,
        backlog=BACKLOG,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain + _LAST_WORDS,
        server_header=False,
    )
    server = _Server(config)
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
        while not server.should_exit and not serving.done():
            await asyncio.sleep(0.1)
        await asyncio.wait({serving}, timeout=drain)
        if not serving.done():
            ended = served.answers.end(Refused("the server ends; ask again later", status=503))
            requests = "1 request was" if ended == 1 else f"{ended} requests were"
            note(f"note: {requests} ended: --drain was over")
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

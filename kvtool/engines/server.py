"""An HTTP server for OpenAI clients: transformers' own handlers, over kvtool's caches.

The handlers of `transformers serve` put answers into the words of the three APIs. kvtool reads the
requests, generates, and adds to the usage what a cache holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    BaseHandler,
    _StreamError,
    parse_assistant_message,
    response_events_to_chunks,
)

from kvtool.engines.offers import Offer, Opener, Prompt
from kvtool.engines.requests import Ask, Choice, Refused, read_request
from kvtool.errors import KvtoolError, UsageError, is_out_of_memory
from kvtool.generation.answering_thread import Answer, Job, LiveAnswers
from kvtool.generation.decoding import Callback
from kvtool.models.load import Loaded

_MOST_WAITING = 1024  # requests; those beyond are asked to come again
_LARGEST_BODY = 32 * 2**20  # bytes
_ROUTES: dict[str, tuple[str, type[BaseHandler], str]] = {
    "/v1/chat/completions": ("chat", ChatCompletionHandler, "chatcmpl-"),
    "/v1/completions": ("completion", CompletionHandler, "cmpl-"),
    "/v1/responses": ("response", ResponseHandler, ""),
}
"""By its path, what a route is called here, its handler, and how its ids begin."""


@dataclass(frozen=True)
class Served:
    """What a server answers with.

    Attributes:
        offers: by the names of models, the first for requests that name none.
        also: other names, each with the one that it stands for.
        choose: makes an offer of the policy and budget that a request chooses.
        api_key: that requests must give; None: anyone may ask.
        max_new_tokens: of requests that do not say.
    """

    loaded: Loaded
    offers: dict[str, Offer]
    also: dict[str, str]
    choose: Callable[[Offer, Choice], Offer]
    opener: Opener
    answers: LiveAnswers
    api_key: str | None
    max_new_tokens: int
    since: int = field(default_factory=lambda: int(time.time()))

    def find(self, ask: Ask) -> Offer:
        """Return what a request asks for by its model's name and its own choice.

        Raises:
            Refused: no model of that name, or a choice that is not allowed.
        """
        name = next(iter(self.offers)) if ask.model is None else ask.model
        name = self.also.get(name, name)
        if name not in self.offers:
            known = ", ".join(f"`{each}`" for each in self.offers)
            raise Refused(
                f"no model `{ask.model}`; this server has {known}",
                status=404,
                code="model_not_found",
            )
        offer, chosen = self.offers[name], ask.kvtool
        if chosen.policy is None and chosen.budget is None:
            return offer
        return self.choose(offer, chosen)


def make_app(served: Served) -> Callable[..., Any]:
    """Return the server as an ASGI application."""

    def models(request: Request) -> Response:
        data = [_model(served, name) for name in served.offers]
        return JSONResponse({"object": "list", "data": data})

    def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        name = served.also.get(name, name)
        if name not in served.offers:
            raise Refused(f"no model `{name}`", status=404, code="model_not_found")
        return JSONResponse(_model(served, name))

    def health(request: Request) -> Response:
        answers = served.answers
        counts = {"running": answers.running, "waiting": answers.waiting, "held": len(answers.held)}
        return JSONResponse({"status": "ok", **counts})

    def load_model(request: Request) -> Response:  # transformers chat asks before it begins
        ready = {"status": "ready", "model": next(iter(served.offers)), "cached": True}
        return Response(f"data: {json.dumps(ready)}\n\n", media_type="text/event-stream")

    app = Starlette(
        routes=[
            *(Route(path, partial(_answer, served, path), methods=["POST"]) for path in _ROUTES),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/load_model", load_model, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys(
            (KvtoolError, HTTPException, Exception, ClientDisconnect),
            lambda request, error: _error(error),
        ),
    )
    return _with_key(app, served.api_key)


def _with_key(app: Callable[..., Any], key: str | None) -> Callable[..., Any]:
    """Ask for a key before anything is read; `/health` needs none."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if key is not None and scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + key.encode()):
                error = Refused("no valid API key is given", status=401, code="invalid_api_key")
                await _error(error)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def _model(served: Served, name: str) -> dict[str, Any]:
    offer = served.offers[name]
    return {
        "id": name,
        "object": "model",
        "created": served.since,
        "owned_by": "kvtool",
        "kvtool": {
            "policy": offer.policy,
            "budget": offer.budget,
            "text_tokens": offer.base_tokens,
        },
    }


def _error(error: Exception) -> JSONResponse:
    """Put what went wrong into one line of JSON."""
    status, code, kind = 500, None, "server_error"
    message = str(error) if isinstance(error, KvtoolError) else ""
    if isinstance(error, UsageError):
        status, kind = getattr(error, "status", 400), "invalid_request_error"
        code = getattr(error, "code", None)
    elif isinstance(error, HTTPException):
        status, kind = error.status_code, "invalid_request_error"
        known = {404: "no such path", 405: "this path takes another method"}
        message = known.get(status, error.detail)
    elif is_out_of_memory(error):
        status, message = 503, "out of memory; ask for less, or again later"
    message = message or f"the server failed: {type(error).__name__}"
    said = _said(" ".join(message.split()), kind, code)
    return JSONResponse({"error": said}, status_code=status)


def _said(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": None, "code": code}


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which a page in a browser cannot send to another's server
        raise Refused(f"the content type is application/json, got `{kind}`", status=415)
    too_large = Refused(f"the body may have {_LARGEST_BODY >> 20} MiB", status=413)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > _LARGEST_BODY:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_BODY:
            raise too_large
    return bytes(body)


async def _answer(served: Served, path: str, request: Request) -> Response:
    route, handler, prefix = _ROUTES[path]
    ask = read_request(route, await _body(request))
    offer = served.find(ask)
    if served.answers.waiting >= _MOST_WAITING:
        raise Refused(f"{_MOST_WAITING} requests wait already; ask again later", status=503)
    new = served.max_new_tokens if ask.max_new_tokens is None else ask.max_new_tokens
    prompt = await asyncio.to_thread(served.opener.prepare, ask, offer, new)
    run = _Run(served, prompt)
    given = {
        "request_id": f"{prefix}{uuid.uuid4().hex}",
        "model": served.loaded.model,
        "processor": served.loaded.tokenizer,
        "model_id": offer.name,
        "inputs": {"input_ids": prompt.ids},
        "gen_config": SimpleNamespace(max_new_tokens=None),  # why it ended is known to the run
        "gen_manager": run,
    }
    given |= {"body": {}} if route == "response" else {}
    if ask.stream:
        stream = handler(None, None)._streaming(**given)
        events = _dressed(stream.body_iterator, run, done=route != "response")
        return StreamingResponse(events, media_type="text/event-stream")
    answer = asyncio.ensure_future(handler(None, None)._non_streaming(**given))
    gone = asyncio.ensure_future(request.receive())  # the body is read: the next message is the end
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=499)
        return JSONResponse(run.dress(json.loads(bytes((await answer).body))))
    finally:
        answer.cancel()
        gone.cancel()


async def _dressed(events: AsyncIterator[str], run: _Run, *, done: bool) -> AsyncIterator[str]:
    """Add what kvtool knows to the events of an answer."""
    try:
        async for text in events:
            parts = [run.dress_event(part) for part in text.split("\n\n") if part]
            yield "".join(f"{part}\n\n" for part in parts)
        if done:
            yield "data: [DONE]\n\n"
    finally:
        run.job.cancel()
        if hasattr(events, "aclose"):
            await events.aclose()


class _Run(BaseGenerateManager):
    """One request on its way through a handler, which takes it for transformers' engine."""

    def __init__(self, served: Served, prompt: Prompt) -> None:
        self._served, self._prompt = served, prompt
        self._loop = asyncio.get_running_loop()
        self._stop = _Stop(prompt.ask.drawing.stop)
        self._answer: Answer | None = None
        self.total_tokens = 0
        self.job = Job(
            prompt.offer.key,
            lambda: served.opener.open(prompt, served.answers.held),
            prompt.max_new_tokens,
            prompt.sequence_bytes,
            prompt.ask.drawing,
            lambda token: None,
            lambda result: None,
            None if prompt.ask.messages is None else self._held_as,
        )

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue, _Run]:
        queue: asyncio.Queue = asyncio.Queue()
        parser = response_parser

        def emit(items: Sequence[Any]) -> None:
            for item in items:
                self._call(queue.put_nowait, item)

        def write(text: str) -> None:
            emit([text] if parser is None else response_events_to_chunks(parser.feed(text)))

        stream = _Text(
            processor, lambda text: self._stop.feed(text, write), whole=parser is not None
        )

        def take(token: int) -> None:
            self.total_tokens += 1
            stream.put_token(token)

        def end(result: Answer | Exception) -> None:
            if isinstance(result, Answer):
                self._answer = result
                stream.end()
                self._stop.end(write)
                if parser is not None:
                    with contextlib.suppress(ValueError, RuntimeError):  # ended inside of a part
                        emit(response_events_to_chunks(parser.finalize()[1]))
                emit([None])
            else:
                if not isinstance(result, KvtoolError):
                    traceback.print_exception(result)
                said = json.loads(bytes(_error(result).body))["error"]["message"]
                emit([_StreamError(said.replace('"', "'").replace("\\", "/"))])

        if parser is not None:
            emit(response_events_to_chunks(parser.initial_events))
        self.job.report_to(take, end)
        self._served.answers.submit(self.job)
        return queue, self

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        future: asyncio.Future[Answer] = self._loop.create_future()

        def end(result: Answer | Exception) -> None:
            def settle() -> None:
                if future.done():
                    return
                if isinstance(result, Answer):
                    future.set_result(result)
                else:
                    future.set_exception(result)

            self._call(settle)

        self.job.report_to(lambda token: None, end)
        self._served.answers.submit(self.job)
        try:
            self._answer = await future
        except asyncio.CancelledError:
            self.job.cancel()
            raise
        tokens = self._answer.token_ids
        self.total_tokens = len(tokens)
        text = processor.decode(tokens, skip_special_tokens=True)
        pieces: list[str] = []
        self._stop.feed(text, pieces.append)
        self._stop.end(pieces.append)
        return "".join(pieces), inputs["input_ids"].shape[1], tokens

    def stop(self) -> None:
        """End nothing: the thread that answers is the server's."""

    def cancel(self) -> None:
        """Let the request go; a handler calls it where its client has gone."""
        self.job.cancel()

    def dress_event(self, event: str) -> str:
        """Add what kvtool knows to one event of a stream."""
        lead = "data: "
        if not event.startswith(lead) or not ('"usage"' in event or '"error"' in event):
            return event
        data = json.loads(event[len(lead) :])
        if isinstance(data.get("error"), str):
            data["error"] = _said(data["error"], "server_error")
        return lead + json.dumps(self.dress(data), ensure_ascii=False, separators=(",", ":"))

    def dress(self, data: dict[str, Any]) -> dict[str, Any]:
        """Add to an answer why it ended, and what its cache holds."""
        whole = data.get("response") or data
        usage, answer = whole.get("usage"), self._answer
        if not isinstance(usage, dict) or answer is None:
            return data
        tokens = self._prompt.ids.shape[1]
        reused = max(tokens - answer.fed, 0) if answer.held else 0
        name = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
        usage[name] = {**(usage.get(name) or {}), "cached_tokens": reused}
        usage["kvtool"] = self._usage(answer)
        for choice in whole.get("choices", ()):
            if choice.get("finish_reason") == "stop" and not (answer.ended or self._stop.found):
                choice["finish_reason"] = "length"
        return data

    def _usage(self, answer: Answer) -> dict[str, Any]:
        report, offer = answer.report, self._prompt.offer
        return {
            "policy": offer.policy,
            "budget": offer.budget,
            "kept_tokens": max(report.kept_per_layer),
            "tokens_seen": report.tokens_seen,
            "held_bytes": report.allocated_bytes + report.state_bytes,
            "full_bytes": report.full_bytes,
            "continued": answer.held,
        }

    def _held_as(self, answer: Answer) -> Any:
        """Return by what the conversation is held: all messages, the answer as it was sent."""
        loaded = self._served.loaded
        said = self._stop.cut(loaded.tokenizer.decode(answer.token_ids, skip_special_tokens=True))
        try:
            content = parse_assistant_message(
                loaded.tokenizer,
                loaded.model,
                answer.token_ids,
                input_ids=self._prompt.ids,
                cleaned_content=said,
            )[0]
        except (ValueError, KeyError, RuntimeError):  # an answer that its own parser cannot read
            return None
        return self._prompt.held_as(content)

    def _call(self, function: Callable[..., Any], *given: Any) -> None:
        """Call a function in the server's own thread; no client hears it once that has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *given)


class _Text(Callback):
    """Hands on text as soon as it is certain, with special tokens for a parser."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], *, whole: bool) -> None:
        super().__init__(tokenizer, on_text)
        self.decode_kwargs["skip_special_tokens"] = not whole

    def put_token(self, token: int) -> None:
        self.put(torch.tensor([token]))


class _Stop:
    """Cuts an answer where the first of its stop texts begins."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self._waiting, self.found = tuple(texts), "", False

    def cut(self, text: str) -> str:
        """Return a whole text up to the first stop text."""
        places = [place for place in (text.find(stop) for stop in self._texts) if place >= 0]
        return text[: min(places)] if places else text

    def feed(self, text: str, write: Callable[[str], None]) -> None:
        """Write what cannot be the beginning of a stop text."""
        if self.found:
            return
        known = self._waiting + text
        cut = self.cut(known)
        self.found = cut != known
        keep = 0 if self.found else self._open(cut)
        self._waiting = cut[len(cut) - keep :]
        if len(cut) > keep:
            write(cut[: len(cut) - keep])

    def end(self, write: Callable[[str], None]) -> None:
        """Write what has waited."""
        if self._waiting:
            write(self._waiting)
        self._waiting = ""

    def _open(self, text: str) -> int:
        """Count the characters at the end that a stop text may begin with."""
        longest = max(map(len, self._texts), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(s.startswith(text[-n:]) for s in self._texts)), 0)

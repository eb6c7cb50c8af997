"""An HTTP server for OpenAI clients: transformers' own handlers, over kvtool's caches.

The handlers of `transformers serve` put answers into the words of the three APIs. kvtool reads the
requests, generates, and adds to the usage what a cache holds.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from kvtool.engines.connections import guarded
from kvtool.engines.offers import Offer, Opener, Prompt
from kvtool.engines.requests import Ask, Choice, Refused, read_request
from kvtool.errors import KvtoolError, UsageError, is_out_of_memory
from kvtool.generation.answering_thread import Answer, Job, LiveAnswers
from kvtool.generation.decoding import Callback, StopText
from kvtool.models.load import Loaded
from kvtool.sizes import bytes_in_words

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
        longest_answer: tokens that a request may ask for; None: any number.
        hosts: by which clients may call the server; None: by any.
    """

    loaded: Loaded
    offers: dict[str, Offer]
    also: dict[str, str]
    choose: Callable[[Offer, Choice], Offer]
    opener: Opener
    answers: LiveAnswers
    api_key: str | None
    max_new_tokens: int
    longest_answer: int | None = None
    hosts: frozenset[str] | None = None
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
    return guarded(app, served.api_key, served.hosts, _error)


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
    message = _without_flags(error) if isinstance(error, KvtoolError) else ""
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


def _without_flags(error: KvtoolError) -> str:
    """Return what a client can use of a mistake: no hint that names options of the server."""
    return error.message if "--" in (error.hint or "") else str(error)


def _said(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": None, "code": code}


async def _body(request: Request, most: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which a page in a browser cannot send to another's server
        raise Refused(f"the content type is application/json, got `{kind}`", status=415)
    too_large = Refused(f"the body may have {bytes_in_words(most)}", status=413)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_large
    return bytes(body)


async def _answer(served: Served, path: str, request: Request) -> Response:
    route, handler, prefix = _ROUTES[path]
    body = await _body(request, min(_LARGEST_BODY, served.opener.most_bytes))
    gone = asyncio.ensure_future(_gone(request))
    reading = asyncio.ensure_future(asyncio.to_thread(_prepare, served, route, body))
    await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not reading.done():
        reading.add_done_callback(lambda done: done.exception())  # which no client hears
        return Response(status_code=499)
    try:
        ask, offer, prompt = await reading
    except BaseException:
        gone.cancel()
        raise
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
        gone.cancel()  # whoever sends a stream watches for it
        stream = handler(None, None)._streaming(**given)
        events = _dressed(stream.body_iterator, run, done=route != "response")
        return StreamingResponse(events, media_type="text/event-stream")
    answer = asyncio.ensure_future(handler(None, None)._non_streaming(**given))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=499)
        return JSONResponse(run.dress(json.loads(bytes((await answer).body))))
    finally:
        answer.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    """Wait until a client, whose body is read, has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _prepare(served: Served, route: str, body: bytes) -> tuple[Ask, Offer, Prompt]:
    """Read a request and turn it into tokens, aside from the loop that answers all clients."""
    ask = read_request(route, body)
    offer = served.find(ask)
    if served.answers.waiting >= _MOST_WAITING:
        raise Refused(f"{_MOST_WAITING} requests wait already; ask again later", status=503)
    new = ask.max_new_tokens
    if new is None:
        new = served.max_new_tokens
    elif served.longest_answer is not None and new > served.longest_answer:
        raise Refused(f"an answer may have {served.longest_answer} tokens, and {new} are asked for")
    try:
        return ask, offer, served.opener.prepare(ask, offer, new)
    except Exception:
        raise
    except BaseException as error:  # a panic of a tokenizer is none of Python's exceptions
        raise Refused(f"the text cannot be read: {type(error).__name__}") from None


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
        self._stop = StopText(prompt.ask.drawing.stop)
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

        stream = Callback(
            processor,
            lambda text: self._stop.feed(text, write),
            skip_special_tokens=parser is None,
        )

        def take(token: int) -> None:
            self.total_tokens += 1
            stream.put(torch.tensor([token]))

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
        """Add what kvtool knows to one event of a stream, in the form that OpenAI gives it.

        The reason for the end is in every chunk, and a usage in a last one, if it is asked for.
        """
        lead = "data: "
        if not event.startswith(lead):
            return event
        data = json.loads(event[len(lead) :])
        if isinstance(data.get("error"), str):
            data["error"] = _said(data["error"], "server_error")
        data = self.dress(data)
        parts = [data]
        if "choices" in data:
            for choice in data["choices"]:
                choice.setdefault("finish_reason", None)
            usage = data.pop("usage", None)
            ask = self._prompt.ask
            if ask.stream_options.include_usage:
                data["usage"] = None
                parts += [data | {"choices": [], "usage": usage}] if usage else []
            elif usage and ask.generation_config is not None:
                data["usage"] = usage
        return "\n\n".join(
            lead + json.dumps(part, ensure_ascii=False, separators=(",", ":")) for part in parts
        )

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
        if answer.ended or self._stop.found:
            return data
        for choice in whole.get("choices", ()):
            if choice.get("finish_reason") == "stop":
                choice["finish_reason"] = "length"
        if "output" in whole:
            whole["status"] = "incomplete"
            whole["incomplete_details"] = {"reason": "max_output_tokens"}
            for item in whole["output"]:
                item["status"] = "incomplete"
        if data.get("type") == "response.completed":
            data["type"] = "response.incomplete"
        return data

    def _usage(self, answer: Answer) -> dict[str, Any]:
        report, offer = answer.report, self._prompt.offer
        drawing = self._prompt.ask.drawing
        return {
            "policy": offer.policy,
            "budget": offer.budget,
            "kept_tokens": max(report.kept_per_layer),
            "tokens_seen": report.tokens_seen,
            "held_bytes": report.allocated_bytes + report.state_bytes,
            "full_bytes": report.full_bytes,
            "continued": answer.held,
            **({"seed": drawing.seed} if drawing.temperature else {}),
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

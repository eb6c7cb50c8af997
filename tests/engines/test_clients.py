"""`kvtool serve` and its clients: the forms that OpenAI's have, and what a hostile one can do."""

from __future__ import annotations

import json
import threading
import time

import pytest

from kvtool.calls.serve import prepare_serve
from kvtool.calls.serve_settings import API_KEY, ServeSettings
from kvtool.errors import UsageError
from kvtool.models.load import load
from kvtool.watcher import Watcher
from tests.engines.serving import needs_serve, serving

pytestmark = needs_serve
CHAT = {"messages": [{"role": "user", "content": "The old lamp"}], "max_tokens": 3}
TEXT = {"prompt": "The old lamp", "max_tokens": 3}


@pytest.fixture(scope="module")
def loaded():
    return load()


@pytest.fixture(scope="module")
def server(loaded):
    limits = {"longest_prompt": "2000", "longest_answer": "4000"}
    with serving(
        loaded=loaded, policy="h2o", budget="48", allow_host=["gpu.lan"], **limits
    ) as found:
        yield found


def events(server, path, body):
    connection = server.connect()
    given = json.dumps(body | {"stream": True})
    connection.request("POST", path, given, {"Content-Type": "application/json"})
    text = connection.getresponse().read().decode()
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_requests_without_a_seed_are_drawn_anew(server):
    body = TEXT | {"max_tokens": 12, "temperature": 1.5}
    answers = [server.ask("/v1/completions", body)[1] for _ in range(4)]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert len(set(texts)) > 1
    seed = answers[0]["usage"]["kvtool"]["seed"]
    again = server.ask("/v1/completions", body | {"seed": seed})[1]
    assert again["choices"][0]["text"] == texts[0]
    streamed = {
        "".join(event["choices"][0]["text"] for event in events(server, "/v1/completions", body))
        for _ in range(4)
    }
    assert len(streamed) > 1


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
def test_chunks_have_the_form_of_openai(server, path, body):
    plain = events(server, path, body)
    reasons = [event["choices"][0]["finish_reason"] for event in plain]
    assert reasons == [None] * (len(plain) - 1) + ["length"]
    assert not any("usage" in event for event in plain)
    *asked, last = events(server, path, body | {"stream_options": {"include_usage": True}})
    assert len(asked) == len(plain)
    assert {json.dumps(event["usage"]) for event in asked} == {"null"}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert last["usage"]["kvtool"]["policy"] == "h2o"


def test_a_response_that_is_cut_off_is_incomplete(server):
    body = {"input": "The old lamp", "max_output_tokens": 3}
    answer = server.ask("/v1/responses", body)[1]
    *_, last = events(server, "/v1/responses", body)
    assert last["type"] == "response.incomplete"
    for each in (answer, last["response"]):
        assert each["status"] == each["output"][0]["status"] == "incomplete"
        assert each["incomplete_details"] == {"reason": "max_output_tokens"}


def test_what_changes_nothing_is_accepted(server):
    keys = {"min_p": 0, "repetition_penalty": 1, "top_k": -1, "ignore_eos": False, "n": 1}
    told = {"role": "user", "content": "The old lamp", "name": "me", "id": "7", "type": "message"}
    assert server.ask("/v1/chat/completions", CHAT | keys | {"messages": [told]})[0] == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "`prompt` is given twice"),
        (TEXT | {"max_tokens": 4001}, "an answer may have 4000 tokens, and 4001 are asked for"),
        (TEXT | {"kvtool": {"policy": "os:path"}}, "policy `os:path` is not allowed"),
        (TEXT | {"kvtool": {"policy": "no_such:Thing"}}, "policy `no_such:Thing` is not allowed"),
        (TEXT | {"prompt": "lamp " * 20_000}, "the prompt has more than 2000 tokens"),
        (TEXT | {"top_k": 5}, "kvtool serve does no `top_k` of `5`"),
    ],
)
def test_a_refusal_names_what_a_client_can_change(server, body, words):
    status, answer = server.ask("/v1/completions", body)
    assert status == 400
    assert words in answer["error"]["message"]
    assert "--" not in answer["error"]["message"]


def test_a_body_is_bounded_by_the_longest_prompt(server):
    status, answer = server.ask("/v1/completions", b"[" + b"[]," * 2_000_000 + b"[]]")
    assert (status, answer["error"]["message"][:17]) == (413, "the body may have")


def test_a_panic_of_a_tokenizer_is_an_error_of_the_request(server, loaded, monkeypatch):
    class Panic(BaseException):
        pass

    def encode(*given, **settings):
        raise Panic

    monkeypatch.setattr(type(loaded.tokenizer), "__call__", encode)
    status, answer = server.ask("/v1/completions", TEXT)
    assert (status, answer["error"]["message"]) == (400, "the text cannot be read: Panic")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1:80", "[::1]", "LOCALHOST:1", "gpu.lan"])
def test_a_server_without_a_key_answers_to_this_machine(server, name):
    assert server.ask("/v1/models", Host=name)[0] == 200


@pytest.mark.parametrize("name", ["evil.example", "evil.example:8000", "localhost.evil", ""])
def test_a_server_without_a_key_answers_to_no_other_name(server, name):
    for path in ("/v1/models", "/health"):
        status, answer = server.ask(path, Host=name)
        assert status == 403
        assert "does not answer to the host" in answer["error"]["message"]


def test_which_names_a_server_answers_to():
    assert ServeSettings(host="0.0.0.0").hosts is None
    assert ServeSettings(api_key="k").hosts is None
    assert "localhost" in ServeSettings(host="::1").hosts


@pytest.mark.parametrize("given", ["api_key", "environment"])
def test_an_empty_key_is_refused(given, monkeypatch):
    settings = {"policy": "h2o", "budget": "48"}
    if given == "environment":
        monkeypatch.setenv(API_KEY, "")
    else:
        settings["api_key"] = ""
    with pytest.raises(UsageError, match="not empty"):
        prepare_serve(ServeSettings(**settings), Watcher())


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_that_runs_out_tells_each_client(loaded, stream):

    notes, found = [], []
    with serving(loaded=loaded, policy="h2o", budget="48", note=notes.append) as server:
        body = TEXT | {"max_tokens": 4000}

        def ask():
            if stream:
                found.append(events(server, "/v1/completions", body)[-1])
            else:
                found.append(server.ask("/v1/completions", body))

        asking = threading.Thread(target=ask)
        asking.start()
        while server.ask("/health")[1]["running"] == 0:
            time.sleep(0.02)
    asking.join()
    said = found[0] if stream else found[0][1]
    assert said["error"]["message"] == "the server ends; ask again later"
    assert stream or found[0][0] == 503
    assert notes[-1] == "note: 1 request was ended: --drain was over"

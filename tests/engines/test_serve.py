"""`kvtool serve` on loopback: answers are those of `kvtool.generate`."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvtool
from kvtool.calls.serve import prepare_serve
from kvtool.calls.serve_settings import ServeSettings
from kvtool.errors import UsageError
from kvtool.models.load import load
from kvtool.sizes import bytes_in_words
from kvtool.watcher import Watcher
from tests.chat_templates import CHATML
from tests.engines.serving import needs_serve, serving

pytestmark = needs_serve

TEXT = "The secret code for falcon: 7429103. The old lamp was near the school. "
QUESTION = TEXT * 4 + "\nThe secret code for falcon:"
TURNS = [QUESTION, "And the lamp?", "The secret code for falcon:"]
NEW = 7


@pytest.fixture(scope="module")
def loaded():
    model = load()
    kvtool.attach(model.model)
    return model


@pytest.fixture(scope="module")
def chatty(loaded):
    """The same model with a chat template."""
    from copy import copy
    from dataclasses import replace

    tokenizer = copy(loaded.tokenizer)
    tokenizer.chat_template = CHATML.replace("eos_token", "''")
    return replace(loaded, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def server(loaded):
    with serving(
        loaded=loaded,
        policy="h2o+caote",
        budget="48",
        allow_policies="h2o,snapkv(window=8),full",
        longest_prompt="2000",
    ) as found:
        yield found


def said(client, messages, **settings):
    given = {"model": "reference", "temperature": 0, "max_tokens": NEW} | settings
    return client.chat.completions.create(messages=messages, **given)


def user(text):
    return {"role": "user", "content": text}


def alone(loaded, policy, budget, text=QUESTION, **settings):
    settings = {"max_new_tokens": NEW} | settings
    return kvtool.generate(
        loaded.model, text, policy, budget, tokenizer=loaded.tokenizer, **settings
    )


def test_an_answer_is_that_of_generate(server, loaded):
    expected = alone(loaded, "h2o+caote", 48)
    answer = said(server.client(), [user(QUESTION)])
    (choice,) = answer.choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        expected.prompt_tokens,
        expected.new_tokens,
    )
    held = expected.cache.allocated_bytes + expected.cache.state_bytes
    assert usage.kvtool == {
        "policy": "h2o+caote",
        "budget": "48",
        "kept_tokens": 48,
        "tokens_seen": expected.cache.tokens_seen,
        "held_bytes": held,
        "full_bytes": expected.cache.full_bytes,
        "continued": False,
    }


def test_streaming_and_the_other_routes_say_the_same(server, loaded):
    client, expected = server.client(), alone(loaded, "h2o+caote", 48).text
    events = list(said(client, [user(QUESTION)], stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected
    assert events[-1].choices[0].finish_reason == "length"
    assert events[-1].usage.kvtool["kept_tokens"] == 48
    given = {"model": "reference", "temperature": 0}
    ask = {"prompt": QUESTION, "max_tokens": NEW} | given
    assert client.completions.create(**ask).choices[0].text == expected
    pieces = client.completions.create(**ask, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    ask = {"input": QUESTION, "max_output_tokens": NEW} | given
    answer = client.responses.create(**ask)
    assert (answer.output_text, answer.usage.kvtool["policy"]) == (expected, "h2o+caote")
    *_, last = client.responses.create(**ask, stream=True)
    assert last.response.output_text == expected
    assert last.response.usage.kvtool["kept_tokens"] == 48


def test_a_conversation_goes_on_under_its_budget_as_turns_do(server, loaded):
    turns = alone(loaded, "h2o+caote", 48, None, turns=TURNS).turns
    client, messages = server.client(), []
    for place, (text, expected) in enumerate(zip(TURNS, turns, strict=True)):
        messages.append(user(text))
        answer = said(client, messages)
        messages.append(answer.choices[0].message.model_dump())
        assert messages[-1]["content"] == expected.text
        assert answer.usage.kvtool["kept_tokens"] == 48
        assert answer.usage.kvtool["continued"] is (place > 0)
        assert answer.usage.kvtool["tokens_seen"] == expected.cache.tokens_seen
        assert (answer.usage.prompt_tokens_details.cached_tokens > 0) is (place > 0)
    again = said(client, messages[:-1])  # the text before is no longer held
    assert again.usage.kvtool["continued"] is False


def test_a_conversation_in_a_template_goes_on_as_turns_do(chatty):
    asked = ["Hello. " * 30, "And the lamp?", "Why?"]
    turns = alone(chatty, "h2o+caote", 48, None, turns=asked, system="Be brief.").turns
    with serving(loaded=chatty, policy="h2o+caote", budget="48") as server:
        client, messages = server.client(), [{"role": "system", "content": "Be brief."}]
        for place, (text, expected) in enumerate(zip(asked, turns, strict=True)):
            answer = said(client, [*messages, user(text)])
            messages += [user(text), {"role": "assistant", "content": expected.text}]
            assert answer.choices[0].message.content == expected.text
            assert answer.usage.kvtool["continued"] is (place > 0)


def test_a_template_that_changes_what_was_read_begins_anew(chatty):
    from copy import copy
    from dataclasses import replace

    tokenizer = copy(chatty.tokenizer)
    tokenizer.chat_template = CHATML.replace("m.content", "m.content ~ messages | length")
    with serving(loaded=replace(chatty, tokenizer=tokenizer)) as server:
        client, messages = server.client(), [user("Hello there.")]
        answer = said(client, messages)
        messages += [answer.choices[0].message.model_dump(), user("And?")]
        assert said(client, messages).usage.kvtool["continued"] is False


def test_a_request_chooses_among_the_policies_that_are_allowed(server, loaded):
    client = server.client()
    chosen = {"policy": "snapkv(window=8)", "budget": 32}
    answer = said(client, [user(QUESTION)], extra_body={"kvtool": chosen})
    assert answer.choices[0].message.content == alone(loaded, "snapkv(window=8)", 32).text
    assert answer.usage.kvtool["policy"] == "snapkv(window=8)"
    for choice, words in (
        ({"policy": "tova"}, "policy `tova` is not allowed; this server allows h2o, snapkv"),
        ({"policy": "h2o", "budget": "nothing"}, "nothing"),
        ({"policy": "h20"}, "h2o"),
        ({"policy": "os:path"}, "os"),
        ({"budget": 8}, "policy `h2o+caote` is not allowed"),
        ({"policy": 1}, "kvtool.policy: must be text, got `1`"),
        ({"size": 1}, "kvtool.size"),
    ):
        body = {"messages": [user("Hi")], "kvtool": choice}
        status, found = server.ask("/v1/chat/completions", body)
        assert status == 400
        assert words in found["error"]["message"]


def test_a_stop_text_ends_an_answer_and_is_not_in_it(server, loaded):
    whole = alone(loaded, "h2o+caote", 48).text
    stop = whole[3:6]
    expected = whole[: whole.index(stop)]
    client = server.client()
    answer = said(client, [user(QUESTION)], stop=stop)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        expected,
        "stop",
    )
    events = list(said(client, [user(QUESTION)], stop=[stop, "zzz"], stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected


def test_samples_are_those_of_generate_with_the_seed(server, loaded):
    expected = alone(loaded, "h2o+caote", 48, temperature=0.9, seed=7).text
    answer = said(server.client(), [user(QUESTION)], temperature=0.9, seed=7)
    assert answer.choices[0].message.content == expected


def test_requests_at_the_same_time_get_the_answers_that_they_get_alone(server, loaded):
    texts = [f"{TEXT * (2 + i % 3)} Number {i}. The secret code for falcon:" for i in range(4)]
    expected = [alone(loaded, "h2o+caote", 48, text).text for text in texts]
    client = server.client()
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda text: said(client, [user(text)]), texts))
    same = [a.choices[0].message.content == e for a, e in zip(answers, expected, strict=True)]
    assert sum(same) >= 3  # float32 sums of a batch may decide one tie otherwise
    assert {answer.usage.kvtool["kept_tokens"] for answer in answers} == {48}


def test_a_client_that_goes_away_frees_its_place(server):
    for stream in (False, True):
        connection = server.connect()
        body = {"messages": [user(QUESTION)], "max_tokens": 100_000, "stream": stream}
        body["kvtool"] = {"policy": "full"}
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        while server.ask("/health")[1]["running"] == 0:
            time.sleep(0.01)
        connection.sock.close()
        connection.close()
        end = time.monotonic() + 60
        while server.ask("/health")[1]["running"] and time.monotonic() < end:
            time.sleep(0.01)
        assert server.ask("/health")[1]["running"] == 0


CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, b"{", 400, "not JSON"),
        (CHAT, b"\xff", 400, "not JSON"),
        (CHAT, [], 400, "a JSON object"),
        (CHAT, {}, 400, "messages is missing"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "message 0"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "no role `tool`"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, 400, "must not be empty"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, ""),
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": "x"}]}, 400, "last one"),
        (CHAT, {"messages": [{"role": "system", "content": "x"}, *HI]}, 400, "chat template"),
        (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens"),
        (CHAT, {"messages": HI, "max_tokens": 10**400}, 400, "digits"),
        (CHAT, {"messages": HI, "temperature": -1}, 400, "temperature"),
        (CHAT, {"messages": HI, "top_p": 0}, 400, "top_p"),
        (CHAT, {"messages": HI, "stop": ""}, 400, "stop"),
        (CHAT, {"messages": HI, "stream": 1}, 400, "stream"),
        (CHAT, {"messages": HI, "n": 2}, 400, "`n` of `2`"),
        (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, 400, "`tools`"),
        (CHAT, {"messages": HI, "temprature": 1}, 400, "temperature"),
        (CHAT, {"messages": HI, "model": "other"}, 404, "`reference`"),
        (CHAT, {"messages": HI, "kvtool": 1}, 400, "kvtool: must be a mapping"),
        (CHAT, {"messages": HI, "generation_config": '{"top_k": 5}'}, 400, "no `top_k` of `5`"),
        (CHAT, {"messages": [{"role": "user", "content": "a b " * 3000}]}, 400, "2000 are allowed"),
        ("/v1/completions", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/v1/completions", {"prompt": " "}, 400, "prompt is empty"),
        ("/v1/completions", {"prompt": "a", "echo": True}, 400, "echo"),
        ("/v1/responses", {"input": 1}, 400, "input"),
        ("/v1/responses", {"input": "a", "previous_response_id": "b"}, 400, "previous_response_id"),
        ("/v1/nothing", {}, 404, "no such path"),
        ("/v1/models/other", None, 404, "no model"),
        (CHAT, None, 405, "another method"),
    ],
)
def test_a_wrong_request_gets_one_line_that_says_why(server, path, body, status, words):
    found, answer = server.ask(path, body)
    assert found == status, answer
    assert words in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_bodies_are_json_of_a_size(server, monkeypatch):
    status, found = server.ask(CHAT, {"messages": HI}, **{"Content-Type": "text/plain"})
    assert (status, "application/json" in found["error"]["message"]) == (415, True)
    monkeypatch.setattr("kvtool.engines.server._LARGEST_BODY", 2000)
    for headers in ({}, {"Transfer-Encoding": "chunked"}):
        body = json.dumps({"messages": [user("x" * 3000)]}).encode()
        if headers:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        assert server.ask(CHAT, body, **headers)[0] == 413


def test_models_are_listed_by_name(server):
    client = server.client()
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("reference", "kvtool")
    assert model.kvtool == {"policy": "h2o+caote", "budget": "48", "text_tokens": 0}
    assert client.models.retrieve("reference").id == "reference"
    assert server.ask("/health")[1]["status"] == "ok"


def test_a_key_is_asked_for(loaded):
    from openai import AuthenticationError

    with serving(loaded=loaded, api_key="s3cret") as server:
        assert server.client(api_key="s3cret").models.list().data
        for key in ("s3cre", "s3cret2"):
            with pytest.raises(AuthenticationError, match="no valid API key"):
                server.client(api_key=key).models.list()
        assert server.ask("/v1/models")[0] == 401
        assert server.ask("/health")[0] == 200


def test_held_conversations_leave_when_the_memory_is_full(loaded):
    first = alone(loaded, "h2o", 48)
    size = first.cache.allocated_bytes + first.cache.state_bytes
    with serving(loaded=loaded, policy="h2o", budget="48", memory=f"{5 * size}B") as server:
        client, talks = server.client(), []
        for i in range(6):
            talk = [user(f"{i} {QUESTION}")]
            talk.append(said(client, talk).choices[0].message.model_dump())
            talks.append([*talk, user("And?")])
        assert server.ask("/health")[1]["held"] < 6
        last, oldest = (said(client, talks[i]).usage.kvtool["continued"] for i in (-1, 0))
        assert (last, oldest) == (True, False)
    with serving(loaded=loaded, memory="20000B") as server:
        status, found = server.ask(CHAT, {"messages": HI, "max_tokens": 1000})
        assert (status, "the memory is 20000" in found["error"]["message"]) == (400, True)


def test_conversations_start_from_cached_texts(loaded, tmp_path):
    caches = {}
    for name, policy in (("book", "h2o"), ("paper", "snapkv")):
        caches[name] = tmp_path / f"{name}.kv.safetensors"
        kvtool.compress(
            loaded.model, TEXT * 6, policy, 40, tokenizer=loaded.tokenizer, save=caches[name]
        )
    asked = "The secret code for falcon:"

    def expected(name):
        return kvtool.generate(
            loaded.model,
            asked,
            cache=str(caches[name]),
            tokenizer=loaded.tokenizer,
            max_new_tokens=NEW,
        ).text

    turns = kvtool.generate(
        loaded.model,
        tokenizer=loaded.tokenizer,
        cache=str(caches["book"]),
        turns=[asked, "Why?"],
        max_new_tokens=NEW,
    ).turns
    with serving(loaded=loaded, cache=[str(each) for each in caches.values()]) as server:
        client = server.client()
        names = [model.id for model in client.models.list().data]
        assert names == ["reference", "book@h2o", "paper@snapkv"]
        given = {"model": "paper@snapkv", "prompt": asked, "max_tokens": NEW}
        assert client.completions.create(**given).choices[0].text == expected("paper")
        assert said(client, [user(asked)]).usage.kvtool["policy"] == "full"
        for model in ("book@h2o", "book"):  # a line end parts the text and the message
            answer = said(client, [user(asked)], model=model)
            assert answer.choices[0].message.content == turns[0].text
        talk = [user(asked), {"role": "assistant", "content": turns[0].text}, user("Why?")]
        said(client, talk[:1], model="book")
        answer = said(client, talk, model="book")
        assert answer.usage.kvtool["continued"] is True
        assert answer.choices[0].message.content == turns[1].text
    with serving(loaded=loaded, cache=[str(caches["book"])]) as server:
        answer = said(server.client(), [user(asked)])
        assert answer.choices[0].message.content == turns[0].text


def test_cached_texts_count_in_the_memory(loaded, tmp_path):
    book = tmp_path / "book.kv.safetensors"
    settings = {"tokenizer": loaded.tokenizer, "save": book}
    cache = kvtool.compress(loaded.model, TEXT * 6, "snapkv", 40, **settings)
    held = cache.report().allocated_bytes + cache.report().state_bytes
    given = {"loaded": loaded, "cache": [str(book)]}
    notes = []
    with serving(**given, memory=f"{held + 20000}B", note=notes.append) as server:
        status, found = server.ask(CHAT, {"messages": HI, "max_tokens": 1000})
        assert (status, "the memory is 20000" in found["error"]["message"]) == (400, True)
    assert f"memory: {bytes_in_words(held)} for 1 cached text" in notes
    with pytest.raises(UsageError, match=f"take {held} bytes, and --memory is {held}"):
        prepare_serve(ServeSettings(port=0, **given, memory=f"{held}B"), Watcher()).run(
            Watcher(), print
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"memory": "nine"}, "--memory is a number of bytes"),
        ({"max_new_tokens": "0"}, "--max-new-tokens"),
        ({"cache": ["none.safetensors"]}, "does not exist"),
        ({"api_key": "a b"}, "ASCII"),
        ({"tensor_parallel": True}, "one process"),
        ({"allow_policies": "h2o,h3o"}, "h3o"),
        ({"policy": "h2o", "budget": "0"}, "budget"),
        ({"host": "no such host"}, "--host"),
    ],
)
def test_a_server_that_cannot_be_is_refused_before_the_model_is_loaded(settings, words):
    with pytest.raises(UsageError, match=words):
        prepare_serve(ServeSettings(port=0, **settings), Watcher()).run(Watcher(), print)

"""`kvtool serve` at length: broken bodies, signals and the page."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvtool
from kvtool.models.load import load
from tests.engines.serving import needs_serve, process, serving

pytestmark = [needs_serve, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]
TEXT = "The secret code for falcon: 7429103. The old lamp was near the school. "
QUESTION = TEXT * 4 + "\nThe secret code for falcon:"
NEW = 12


@pytest.fixture(scope="module")
def loaded():
    model = load()
    kvtool.attach(model.model)
    return model


def said(client, text, **settings):
    given = {"model": "reference", "temperature": 0, "max_tokens": NEW} | settings
    return client.chat.completions.create(messages=[{"role": "user", "content": text}], **given)


_VALUES = [
    *(None, True, False, 0, -1, 1, 2**70, 0.5, -1e300, "", "x", "\ud800", "\x00", [], [[]], {}),
    *([None], [1], ["a"], {"a": 1}, [{"role": "user"}], [{"role": "user", "content": [{}]}]),
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}],
]
_KEYS = [
    *("messages", "prompt", "input", "model", "stream", "max_tokens", "temperature", "top_p"),
    *("seed", "stop", "n", "kvtool", "tools", "generation_config", "instructions", "logprobs"),
]


def test_many_malformed_bodies_get_one_line_each(loaded):
    """And those that are right by chance an answer; the server goes on."""
    draw = random.Random(0)
    good = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
    }
    statuses: dict[int, int] = {}
    with serving(loaded=loaded, max_new_tokens="1", longest_prompt="500") as server:
        for _ in range(150):
            path = draw.choice(list(good))
            body = dict(good[path])
            for _ in range(draw.randint(1, 3)):
                body[draw.choice(_KEYS)] = draw.choice(_VALUES)
            if body.get("stream") is True:
                body["stream"] = 1
            text = json.dumps(body).encode()
            if draw.random() < 0.4:
                place = draw.randrange(len(text))
                text = draw.choice(
                    [text[:place], text[:place] + b"\xfe" + text[place:], text + b"}", b""]
                )
            status, found = server.ask(path, text)
            statuses[status] = statuses.get(status, 0) + 1
            assert status in (200, 400, 404), found
            assert (status == 200) != ("error" in found)
        assert statuses[400] > 75
        assert server.ask("/health")[0] == 200


def test_sigterm_lets_answers_end_and_a_killed_server_starts_again():
    with process("-p", "h2o", "-b", "48", "--port", "0") as (server, found):
        port = found.address.rsplit(":", 1)[1].split("/")[0]
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(said, found.client(), QUESTION, max_tokens=200)
            while not found.ask("/health")[1]["running"]:
                pass
            server.send_signal(signal.SIGTERM)
            assert answer.result().usage.completion_tokens > 1
        assert server.wait(60) == 0
    for _ in range(2):  # the first one is killed, and the port is free at once
        with process("-p", "h2o", "-b", "48", "--port", port) as (server, found):
            assert said(found.client(), "Hi").usage.kvtool["policy"] == "h2o"
            server.send_signal(signal.SIGKILL)
            server.wait()


def test_a_drain_that_is_over_ends_answers():
    with process("--port", "0", "--drain", "0") as (server, found):
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(said, found.client(), QUESTION, max_tokens=8_000)
            while not found.ask("/health")[1]["running"]:
                pass
            server.send_signal(signal.SIGTERM)
            assert answer.exception() is not None
        assert server.wait(60) == 0


def test_the_chat_of_transformers_holds_a_conversation(loaded):
    """Its command reads questions from a pipe, and says `n` to more than seven tokens."""
    lines = [QUESTION.replace("\n", " "), "n", "The secret code for falcon:", "n", "!exit"]
    with serving(loaded=loaded, policy="h2o+caote", budget="48") as server:
        run = subprocess.run(
            [
                *(sys.executable, "-m", "transformers.cli.transformers", "chat", "reference"),
                *(server.address, "max_new_tokens=7", "do_sample=False", "--user", "me"),
            ],
            input="\n".join(lines),
            capture_output=True,
            text=True,
        )
        if "No module named 'requests'" in run.stderr:  # which 5.17 does not ask pip for
            pytest.skip("transformers chat of this release needs requests")
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("7 tokens in") == 2
        assert "7429103" in run.stdout
        assert server.ask("/health")[1]["held"] == 1  # the second question went on with the first


def test_a_port_that_is_taken_is_said_at_once(loaded):
    with serving(loaded=loaded) as server:
        port = server.address.rsplit(":", 1)[1].split("/")[0]
        run = subprocess.run(
            [sys.executable, "-m", "kvtool", "serve", "--port", port],
            capture_output=True,
            text=True,
        )
    assert run.returncode == 1
    assert f"127.0.0.1:{port} cannot be listened to" in run.stderr


def test_the_page_does_what_it_says(capsys):
    """The server, curl and openai's client."""
    page = (ROOT / "kvtool/engines/README.md").read_text()
    section = page.split("## Serve a policy", 1)[1].split("\n## ", 1)[0]
    start, curl = re.findall(r"```shell\n\$ (.*?)\n(.*?)```", section, re.DOTALL)
    (code,) = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
    command = start[0].removeprefix("kvtool serve ").replace("--port 8000", "--port 0").split()
    with process(*command) as (_, server):
        here = server.address.removesuffix("/v1")
        run = subprocess.run(
            ["bash", "-c", curl[0].replace("http://127.0.0.1:8000", here)],
            capture_output=True,
            text=True,
        )
        (choice,) = json.loads(run.stdout)["choices"]
        assert "7429103" in choice["text"]
        exec(code.replace("http://127.0.0.1:8000", here), {})
    first, second = capsys.readouterr().out.splitlines()
    assert (first.split()[-1], second.split()[-1]) == ("False", "True")

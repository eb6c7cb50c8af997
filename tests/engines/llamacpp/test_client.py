"""`restore` and `ask` against a small server that can do wrong what `llama-server` can."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import kvtool as kv
from kvtool.engines.llamacpp import ask, restore
from kvtool.engines.llamacpp.format import read_ids
from kvtool.errors import KvtoolError, UsageError
from kvtool.models.load import load
from tests.models import tiny_gguf

FACTS = "The secret code for falcon: 7429103. The old lamp was near the school. Rain fell. " * 6


class Server(HTTPServer):
    """Answers like `llama-server`, and notes what it was asked.

    Attributes:
        changes: of its answers, by path without what is behind `?`.
    """

    def __init__(self, file) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.changes, self.refuses = [], {}, False
        ids = read_ids(file)
        self.answers = {
            "/slots/0": {"n_restored": len(ids), "n_read": file.stat().st_size},
            "/completion": {"content": "7429103", "timings": {"cache_n": len(ids), "prompt_n": 5}},
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, data, self.headers["Authorization"]))
        name = self.path.split("?")[0]
        known = self.server.answers.get(name)
        refused = known is None or (self.server.refuses and name.startswith("/slots"))
        said = {"error": {"message": "Unable to restore slot"}} if refused else known
        body = json.dumps(said | self.server.changes.get(name, {})).encode()
        self.send_response(400 if refused else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    loaded, file = load(), tmp_path_factory.mktemp("slots") / "book.bin"
    cache = kv.compress(loaded, FACTS, "snapkv", 64)
    kv.export(cache, file, to="llamacpp", model=loaded.model, tokenizer=loaded.tokenizer)
    return file


@pytest.fixture
def server(book):
    with Server(book) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_question_follows_the_ids_of_a_cache_that_was_restored(server, book):
    assert ask(f"{server.url}/", book, " Which code?", max_new_tokens=8, api_key="k") == "7429103"
    (first, file, key), (second, asked, _) = server.asked
    assert (first, file, key) == (
        "/slots/0?action=restore",
        {"filename": "book.bin"},
        "Bearer k",
    )
    assert second == "/completion"
    assert asked == {
        "prompt": [*read_ids(book), " Which code?"],
        "n_predict": 8,
        "temperature": 0.0,
        "id_slot": 0,
        "cache_prompt": True,
    }


def test_a_question_may_be_ids(server, book):
    tokenizer = load().tokenizer
    ids = tokenizer(" Which code?", add_special_tokens=False)["input_ids"]
    ask(server.url, book, ids)
    ask(server.url, book, " Which code?", tokenizer=tokenizer)
    prompts = [data["prompt"] for path, data, _ in server.asked if path == "/completion"]
    assert prompts == [[*read_ids(book), *ids]] * 2


def test_a_question_closes_an_open_message(server, tmp_path):
    pytest.importorskip("gguf", reason="GGUF files need the package gguf")
    loaded, file = load(str(tiny_gguf.write(tmp_path / "tiny.gguf"))), tmp_path / "chat.bin"
    cache = kv.compress(loaded, FACTS, "recency", 64)
    kv.export(cache, file, to="llamacpp", model=loaded.model, tokenizer=loaded.tokenizer)
    server.answers["/slots/0"]["n_read"] = file.stat().st_size
    ask(server.url, file, "Which?")
    end = "\nWhich?<|im_end|>\n<|im_start|>assistant\n"
    assert server.asked[-1][1]["prompt"] == [*read_ids(file), end]


WRONG = {
    "a slot that was displaced": (
        {"/completion": {"timings": {"cache_n": 63}}},
        "took 63 of 64 tokens from the cache and read the others as text",
    ),
    "a server that does not say": ({"/completion": {"timings": {}}}, "took 0 of 64 tokens"),
    "another file of that name": ({"/slots/0": {"n_restored": 63}}, "restored 63 tokens"),
    "another file of as many tokens": ({"/slots/0": {"n_read": 7}}, r"64 tokens \(7 bytes\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_answer_that_is_not_of_the_cache_is_an_error(server, book, case):
    server.changes, told = WRONG[case]
    with pytest.raises(KvtoolError, match=told):
        ask(server.url, book, " Which code?")


def test_nothing_is_asked_where_the_cache_was_not_restored(server, book):
    server.refuses = True
    with pytest.raises(KvtoolError, match=r"llama-server refused .*: .*Unable to restore slot"):
        ask(server.url, book, " Which code?")
    assert [path for path, *_ in server.asked] == ["/slots/0?action=restore"]


def test_restore_gives_the_ids(server, book):
    assert restore(server.url, str(book)) == read_ids(book)
    with pytest.raises(KvtoolError, match="refused /slots/3"):
        restore(server.url, book, slot=3)


def test_what_cannot_be_asked_is_refused(server, book, tmp_path):
    with pytest.raises(UsageError, match="no question"):
        ask(server.url, book, "")
    with pytest.raises(UsageError, match=r"cannot read .*gone\.bin"):
        restore(server.url, tmp_path / "gone.bin")
    alone = tmp_path / "alone.bin"
    alone.write_bytes(book.read_bytes())
    with pytest.raises(UsageError, match=r"alone\.bin\.json`, which the export writes"):
        ask(server.url, alone, "Which?")
    assert server.asked == []
    with pytest.raises(KvtoolError, match="no answer of llama-server"):
        restore("http://127.0.0.1:9", book)

"""A server on this machine, in a thread of the tests or in a process of its own."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from kvtool.calls.serve_settings import ServeSettings
from kvtool.extras import installed
from kvtool.watcher import Watcher

needs_serve = pytest.mark.skipif(not installed("serve"), reason="kvtool[serve] is not installed")


@dataclass(frozen=True)
class Server:
    """Where a server listens."""

    address: str

    def client(self, **settings):
        """Return openai's client; it asks once."""
        from openai import OpenAI

        given = {"api_key": "none", "max_retries": 0, "timeout": 600} | settings
        return OpenAI(base_url=self.address, **given)

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection."""
        return http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=600)

    def ask(self, path: str, body=None, method: str | None = None, **headers):
        """Ask without openai's client: the status and what the JSON says.

        Args:
            body: bytes, or what is put into JSON; None: there is none.
        """
        connection = self.connect()
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        given = {"Content-Type": "application/json"} | headers
        connection.request(method or ("GET" if body is None else "POST"), path, body, given)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        assert b"\n" not in text.strip(), "an answer is one line"
        return response.status, json.loads(text)


@contextmanager
def serving(*, note=lambda text: None, **settings) -> Iterator[Server]:
    """Serve in a thread; the model is loaded unless it is given as `loaded`.

    Args:
        note: takes the lines that a person should read.
    """
    from kvtool.calls.serve import prepare_serve

    ready, found, failed = threading.Event(), [], []
    watcher = Watcher()
    watcher.note = note
    run = prepare_serve(ServeSettings(port=0, drain=0, **settings), Watcher())

    def on_ready(address, end):
        found.extend((address, end))
        ready.set()

    def work():
        try:
            run.run(watcher, on_ready)
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    assert not failed, failed
    try:
        yield Server(found[0])
    finally:
        found[1]()
        thread.join()


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen, Server]]:
    """Serve in a process of its own.

    Raises:
        RuntimeError: it ended before it listened; what it wrote.
    """
    command = [sys.executable, "-m", "kvtool", "serve", "--no-progress", *arguments]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    written = []
    try:
        for line in started.stderr:
            if line.startswith("listening on "):
                break
            written.append(line)
        else:
            raise RuntimeError(f"the server ended before it listened: {''.join(written[-5:])}")
        threading.Thread(target=started.stderr.read, daemon=True).start()
        yield started, Server(line.split()[-1])
    finally:
        started.kill()
        started.wait()

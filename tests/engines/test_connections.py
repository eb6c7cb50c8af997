"""Connections that send nothing are closed, and there are no more than a number of them."""

import asyncio
import http.client
import socket
import threading
import time

import pytest

from kvtool.extras import installed

pytestmark = pytest.mark.skipif(not installed("serve"), reason="kvtool[serve] is not installed")
ASK = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.fixture
def served():
    """Serve the length of bodies with short limits, and return the port."""
    import uvicorn

    from kvtool.engines import connections

    class Short(connections.BoundedConnections):
        most, head, body = 8, 1.0, 1.0

    connections._say_full.cache_clear()

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        if scope["path"] == "/slow":
            await asyncio.sleep(2)
        head = [(b"content-length", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"%d" % min(len(body), 9)})

    config = uvicorn.Config(app, port=0, http=Short, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join()


def ask(port, path="/", body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def opened(port, text=b""):
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(text)
    return connection


def is_closed(connection):
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "sent", [b"", ASK[:20], ASK.replace(b"\r\n\r\n", b"\r\ncontent-length: 9\r\n\r\nabc")]
)
def test_a_request_that_does_not_come_ends_its_connection(served, sent):
    assert is_closed(opened(served, sent))
    assert ask(served) == (200, b"0")


def test_an_answer_may_take_longer_than_a_request(served):
    assert ask(served, "/slow", b"abc") == (200, b"3")


def test_a_second_request_has_its_own_time(served):
    connection = http.client.HTTPConnection("127.0.0.1", served, timeout=30)
    for _ in range(4):
        connection.request("GET", "/", b"ab")
        assert connection.getresponse().read() == b"2"
        time.sleep(0.4)


def test_one_too_many_takes_the_place_of_the_oldest(served, caplog):
    many = [opened(served) for _ in range(20)]
    assert ask(served) == (200, b"0")
    assert all(is_closed(each) for each in many[:12])
    assert sum("8 connections are open" in line for line in caplog.messages) == 1

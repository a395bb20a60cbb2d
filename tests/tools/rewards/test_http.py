"""The HTTP client against a loopback server that keeps to nothing."""

import asyncio
import gzip
import json
import socket
import threading
import time

import pytest
from tests.machine import seconds, wait_until
from tests.rewards.asking import results_of

from lightrft.rewards.types import RewardError
from lightrft.tools.rewards import http
from lightrft.tools.rewards.http import (
    ClientRequest,
    HttpClient,
    RequestError,
    RequestLimits,
    is_loopback,
    shown_address,
)
from lightrft.tools.rewards.remote import RemoteReward

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Raw:
    """Answers the n-th connection by the n-th piece of bytes, or function of the socket."""

    def __init__(self, *script):
        self.script, self.requests = script, []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/x"
        self.closing = threading.Event()
        self.threads = [threading.Thread(target=self.accept, daemon=True)]
        self.threads[0].start()

    def accept(self):
        while not self.closing.is_set():
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            connection.settimeout(20)
            answer = self.script[min(len(self.requests), len(self.script) - 1)]
            self.requests.append(b"")
            thread = threading.Thread(
                target=self.serve, args=(connection, len(self.requests) - 1, answer), daemon=True
            )
            thread.start()

    def serve(self, connection, index, answer):
        try:
            with connection:
                text = b""
                while b"\r\n\r\n" not in text:
                    text += connection.recv(65536)
                size = int(text.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                while len(text.partition(b"\r\n\r\n")[2]) < size:
                    text += connection.recv(65536)
                self.requests[index] = text
                if callable(answer):
                    answer(self, connection)
                else:
                    connection.sendall(answer)
        except (OSError, ValueError):
            pass  # the client has gone

    def close(self):
        self.closing.set()
        self.socket.close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.01)


@pytest.fixture
def serve():
    servers = []

    def start(*script):
        servers.append(Raw(*script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def client():
    clients = []

    def make(limit=None, **options):
        clients.append(HttpClient(RequestLimits(limit or seconds(10.0), **options)))
        return clients[-1]

    yield make
    for made in clients:
        made.close()


@pytest.fixture
def fetch(client):
    """A function of a server and of limits: what a client gets there."""

    def fetched(server, limit=None, **options):
        return client(limit, **options).fetch(ClientRequest(server.url, b"{}"))

    return fetched


def dripping(first, piece):
    def drip(server, connection):
        connection.sendall(first)
        while not server.closing.wait(0.05):
            connection.sendall(piece)

    return drip


@pytest.mark.parametrize(
    "first, piece",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 100000\r\n\r\n", b"x"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 100000\r\n\r\n", b"x"),
        (b"", b"H"),
    ],
    ids=["body", "headers", "404 page", "503 page", "status line"],
)
def test_an_answer_that_drips_ends_at_the_deadline(serve, fetch, first, piece):
    server = serve(dripping(first, piece))
    start = time.monotonic()
    with pytest.raises(RequestError, match=r"no answer within 0.5 s"):
        fetch(server, 0.5)
    assert time.monotonic() - start < seconds(8)


def endless(server, connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while not server.closing.is_set():
        server.num_sent = getattr(server, "num_sent", 0) + 65536
        connection.sendall(b" " * 65536)


def test_an_endless_answer_is_cut_at_its_limit(serve, fetch):
    server = serve(endless)
    with pytest.raises(RequestError, match="longer than 1000000 bytes"):
        fetch(server, max_bytes=1_000_000)
    assert server.num_sent < 50_000_000  # the buffers of two sockets, not the 600 MB of a flood


def test_a_compressed_answer_is_refused_before_it_is_unpacked(serve, fetch):
    packed = gzip.compress(b" " * 50_000_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    server = serve(head + packed)
    with pytest.raises(RequestError, match="compressed"):
        fetch(server)
    assert b"accept-encoding: identity" in server.requests[0].lower()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(serve, fetch, status):
    other = serve(OK)
    head = f"HTTP/1.1 {status} Go\r\nLocation: {other.url}\r\nContent-Length: 0\r\n\r\n"
    server = serve(head.encode())
    with pytest.raises(RequestError, match=f"status {status}: redirects are not followed"):
        fetch(server)
    assert (len(server.requests), other.requests) == (1, [])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"\x16\x03\x01\x00",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_one_error_after_three_attempts(serve, fetch, answer):
    server = serve(answer)
    with pytest.raises(RequestError) as caught:
        fetch(server)
    assert "\n" not in str(caught.value)
    assert 1 <= len(server.requests) <= 3
    # The positive control: with one good answer behind it, the same request succeeds.
    assert fetch(serve(answer, OK)) == b"{}"


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 599])
def test_a_busy_service_is_asked_again(serve, fetch, status):
    server = serve(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode(), OK)
    assert fetch(server) == b"{}"
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422])
def test_a_refusal_is_final_and_shows_what_was_said(serve, fetch, status):
    said = b"no\x1b[31m such\r\nthing" + b"x" * 5000
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(said)}\r\n\r\n"
    server = serve(head.encode() + said)
    with pytest.raises(RequestError, match=rf"status {status}, .*such thing") as caught:
        fetch(server)
    assert len(server.requests) == 1
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_retry_after_is_waited_for_inside_the_deadline(serve, fetch):
    busy = b"HTTP/1.1 429 Busy\r\nRetry-After: %s\r\nContent-Length: 0\r\n\r\n"
    start = time.monotonic()
    assert fetch(serve(busy % b"0.6", OK)) == b"{}"
    assert time.monotonic() - start >= 0.6
    server = serve(busy % b"3600")
    start = time.monotonic()
    with pytest.raises(RequestError, match=r"no answer within 300 s and 1 attempts: status 429"):
        fetch(server, 300.0)
    assert time.monotonic() - start < 200  # nothing could come in time, so nobody waits
    for after in (b"-1", b"nan", b"inf", b"Fri, 01 Jan 2100 00:00:00 GMT"):
        assert fetch(serve(busy % after, OK)) == b"{}"


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://[::1",
        "http://a b/",
        "http://h:99999999/",
        "gopher://h/",
        "x",
        "",
        "http://\x00/",
        "http://" + "a" * 300 + "/",
        "http://h\udcff/",
        "http://127.0.0.1:1/",
    ],
)
def test_addresses_that_lead_nowhere_are_one_error(client, url):
    with pytest.raises(RequestError) as caught:
        client(0.5).fetch(ClientRequest(url, b"{}"))
    assert "\n" not in str(caught.value)


def test_credentials_of_an_address_are_sent_and_not_shown(serve, client):
    server = serve(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")
    url = f"http://me:hunter2@127.0.0.1:{server.port}/p?token=hunter3"
    with pytest.raises(RequestError) as caught:
        client().fetch(ClientRequest(url, b"{}"))
    assert "hunter" not in str(caught.value)
    assert b"POST /p?token=hunter3" in server.requests[0]
    assert b"authorization: basic" in server.requests[0].lower()
    assert shown_address(url) == f"http://127.0.0.1:{server.port}/p"


KEY = "sk-key/0123456789"


@pytest.mark.parametrize(
    "said",
    [
        "bad key " + KEY,
        "Authorization: Bearer " + KEY,
        json.dumps({"key": KEY}).replace("/", "\\/"),
        "sk-key%2F0123456789",
        "x" * 790 + KEY,
        "bad " * 500 + KEY,
        "secret words and bWU6aHVudGVyMg==",
    ],
)
@pytest.mark.parametrize("status", [b"401 No", b"503 Busy", b"200 OK"])
def test_no_answer_shows_the_credentials_of_its_request(serve, client, said, status):
    body = said.encode()
    server = serve(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
    request = ClientRequest(
        f"http://me:hunter2@127.0.0.1:{server.port}/p",
        b"{}",
        headers={"authorization": f"Bearer {KEY}"},
    )
    (answer,) = client(seconds(0.5) if b"503" in status else None).fetch_all([request])
    shown = str(answer) + repr(answer)
    assert not any(part in shown for part in ("sk-key", "0123", "aHVudGVyMg"))
    if len(said) < 100:
        assert "***" in shown


def test_what_a_short_credential_spells_elsewhere_is_no_credential(serve, client):
    server = serve(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"rewards":[1]}')
    request = ClientRequest(server.url, b"{}", headers={"authorization": "Bearer 1"})
    assert client().fetch(request) == b'{"rewards":[1]}'


def test_proxies_of_the_environment_do_not_stand_before_this_machine(serve, client, monkeypatch):
    proxy = serve(OK)
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    monkeypatch.delenv("no_proxy", raising=False)
    server = serve(OK)
    trusting = HttpClient(RequestLimits(5.0), uses_environment=True)
    try:
        assert trusting.fetch(ClientRequest(server.url, b"{}")) == b"{}"
        assert proxy.requests == []
        # The positive control: an address elsewhere goes through it.
        assert trusting.fetch(ClientRequest("http://example.invalid/x", b"{}")) == b"{}"
        assert len(proxy.requests) == 1
    finally:
        trusting.close()


def test_loopback_is_known_in_every_spelling():
    for host in ("127.0.0.1", "127.9.9.9", "localhost", "[::1]", "LOCALHOST.", "a.localhost"):
        assert is_loopback(f"http://{host}:1/x"), host
    for host in ("128.0.0.1", "localhost.example", "h"):
        assert not is_loopback(f"http://{host}/x"), host


def test_many_requests_share_a_deadline_and_no_more_run_at_once_than_allowed(serve, client):
    running, most = [], []

    def counted(server, connection):
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        connection.sendall(OK)

    server = serve(counted)
    found = client(30.0, concurrency=3).fetch_all([ClientRequest(server.url, b"{}")] * 12)
    assert found == [b"{}"] * 12
    assert max(most) <= 3
    silent = serve(lambda server, connection: server.closing.wait(20))
    start = time.monotonic()
    found = client(0.5, concurrency=2).fetch_all([ClientRequest(silent.url, b"{}")] * 8)
    assert all(isinstance(item, RequestError) for item in found)
    assert time.monotonic() - start < seconds(8)


def test_a_client_works_inside_a_running_loop_and_again_after_its_end(serve, client):
    server, made, before = serve(OK), client(), set(threading.enumerate())

    async def inside():
        return made.fetch(ClientRequest(server.url, b"{}"))

    assert asyncio.run(inside()) == b"{}"
    made.close()
    made.close()
    assert made.fetch(ClientRequest(server.url, b"{}")) == b"{}"
    made.close()
    assert wait_until(
        lambda: "http" not in [t.name for t in {*threading.enumerate()} - before],
    )


BAD_JSON = {
    "deep lists": "[" * 200_000,
    "deep objects": '{"a":' * 200_000,
    "huge integer": '{"rewards": [' + "9" * 6_000 + ", 1]}",
    "integer beyond floats": '{"rewards": [' + "9" * 400 + ", 1]}",
    "nan": '{"rewards": [NaN, 1]}',
    "infinity": '{"rewards": [1, -Infinity]}',
    "overflow": '{"rewards": [1e999, 1]}',
    "text": '{"rewards": "ab"}',
    "texts": '{"rewards": ["1", "2"]}',
    "booleans": '{"rewards": [true, false]}',
    "nulls": '{"rewards": [null, null]}',
    "short": '{"rewards": [1]}',
    "long": '{"rewards": [1, 2, 3]}',
    "nested": '{"rewards": [[1], [2]]}',
    "object": '{"rewards": {"0": 1, "1": 2}}',
    "no object": "[1, 2]",
    "number": "7",
    "nothing": "",
    "html": "<html>\x1b]0;owned\x07</html>",
    "utf-16": "{}".encode("utf-16"),
    "latin": b"\xff\xfe\xfa",
    "components": '{"rewards": [1, 2], "components": [1]}',
    "short component": '{"rewards": [1, 2], "components": {"a": [1]}}',
    "name of escapes": '{"rewards": [1, 2], "components": {"a\\u001b[2J": [1, 2]}}',
    "name of a surrogate": '{"rewards": [1, 2], "components": {"\\ud800": [1, 2]}}',
    "long name": '{"rewards": [1, 2], "components": {"%s": [1, 2]}}' % ("n" * 5000),
    "many components": json.dumps(
        {"rewards": [1, 2], "components": {str(i): [1, 2] for i in range(101)}}
    ),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_every_bad_answer_is_one_printable_line(serve, name):
    body = BAD_JSON[name]
    body = body if isinstance(body, bytes) else body.encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    reward = RemoteReward(serve(head + body).url, timeout_seconds=20)
    try:
        with pytest.raises(RewardError) as caught:
            results_of(reward, ["a", "b"])
    finally:
        reward.close()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500

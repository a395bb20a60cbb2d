"""Each limit of the endpoint: what a client sees of it, and that nothing is left behind."""

import queue
import select
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.machine import seconds, wait_until
from tests.rollout.agents.endpoint_desk import body_of

from lightrft.datasets.chat_ids import MAX_IMAGES, MAX_PIXELS
from lightrft.rollout.agents.conversations import MAX_KEPT_BYTES
from lightrft.rollout.agents.http_server import (
    MEDIA_LIMITS,
    HttpLimits,
    HttpResponse,
    HttpServer,
)

ROOT = Path(__file__).parents[3]


def silence(desk):
    """From now on calls wait: what they ask lies where nobody looks."""
    desk.endpoint.events.put(None)
    desk.thread.join()
    desk.endpoint.events = queue.SimpleQueue()


def listen_again(desk):
    desk.thread = threading.Thread(target=desk.serve, daemon=True)
    desk.thread.start()


def calls_that_wait(desk, count):
    """Futures of calls, once all of them wait."""
    silence(desk)
    threads, texts = ThreadPoolExecutor(count), map(str, range(count))
    talks = ([{"role": "user", "content": text}] for text in texts)
    calls = [threads.submit(desk.post, messages=talk) for talk in talks]
    assert wait_until(lambda: desk.endpoint.events.qsize() == count)
    return calls


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=seconds(20))


def error_of(answer):
    return answer.status_code, answer.json()["error"]["code"]


def test_an_idle_connection_is_closed(desk_with):
    desk = desk_with(idle_seconds=0.5, max_connections=1)
    with connect(desk.endpoint.server.port) as line:
        assert line.recv(1) == b""
    host = f"127.0.0.1:{desk.endpoint.server.port}"
    with connect(desk.endpoint.server.port) as line:  # after an answer, too
        head = f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nx-api-key: {desk.key}\r\n\r\n"
        line.sendall(head.encode())
        found = b""
        while part := line.recv(65536):
            found += part
        assert found.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("drop", [b"", b"x"])
def test_a_request_that_stops_or_drips_is_closed(desk_with, drop):
    desk = desk_with(read_seconds=0.5)
    with connect(desk.endpoint.server.port) as line:
        line.sendall(b"POST /v1/chat/comp")
        assert wait_until(lambda: line.sendall(drop) or select.select([line], [], [], 0)[0])
        found = b"".join(iter(lambda: line.recv(65536), b""))
    assert found.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nretry-after: 1\r\n" in found
    assert b"longer than 0.5 s" in found


def test_a_client_that_takes_no_answer_is_let_go():
    ended, body = threading.Event(), b"x" * (1 << 25)

    def note(is_sent):
        if not is_sent:
            ended.set()

    async def handle(request):
        return HttpResponse(200, body, on_sent=note)

    server = HttpServer(handle, HttpLimits(write_seconds=0.5))
    with connect(server.port) as line:
        line.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert ended.wait(seconds(20))
        # What it had not taken is dropped, and not kept for it.
        received = 0
        while part := line.recv(1 << 20):
            received += len(part)
        assert received < len(body)
    server.close()


def test_connections_beyond_the_bound_are_told_to_come_again(desk_with):
    desk = desk_with(max_connections=3)
    port = desk.endpoint.server.port
    lines = [connect(port) for _ in range(3)]
    with connect(port) as further:
        assert b"\r\nretry-after: 1\r\n" in further.recv(65536)
        assert further.recv(1) == b""
    # More than a connection holds on its way.
    told = post_part(desk, 10_000_000, of=10_000_000, key=desk.key)
    assert told == b"HTTP/1.1 503 Service Unavailable"
    lines.pop().close()

    assert wait_until(desk.serves)
    for line in lines:
        line.close()


def test_too_many_waiting_calls_are_told_to_ask_again(desk_with):
    desk = desk_with(max_waiting=2)
    calls = calls_that_wait(desk, 2)
    answer = desk.post()
    assert error_of(answer) == (429, "rate_limit_exceeded")
    assert (answer.headers["x-should-retry"], answer.headers["retry-after"]) == ("true", "1")
    listen_again(desk)
    assert [call.result().status_code for call in calls] == [200, 200]
    assert desk.post().status_code == 200


def test_a_call_that_is_not_answered_in_time_is_given_up(desk_with):
    desk = desk_with(call_seconds=0.5, max_waiting=1)
    silence(desk)
    answer = desk.post()
    assert error_of(answer) == (504, "timeout")
    assert answer.headers["x-should-retry"] == "true"
    listen_again(desk)
    assert desk.post().status_code == 200
    assert len(desk.asked) == 1


def asking(desk, version="1.1", expects=""):
    """A connection that has sent its request, the body once it may."""
    body = body_of()
    head = (
        f"POST /v1/chat/completions HTTP/{version}\r\n"
        f"host: 127.0.0.1:{desk.endpoint.server.port}\r\n"
        f"authorization: Bearer {desk.key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{expects}\r\n"
    )
    line = connect(desk.endpoint.server.port)
    line.sendall(head.encode())
    assert not expects or line.recv(65536) == b"HTTP/1.1 100 \r\n\r\n"
    line.sendall(body)
    return line


def test_a_client_that_asks_first_is_told_to_go_on(desk_with):
    with asking(desk_with(), expects="expect: 100-continue\r\n") as line:
        assert line.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_has_closed_its_sending_side_gets_its_answer(desk_with, version):
    desk = desk_with()
    silence(desk)
    with asking(desk, version) as line:
        line.shutdown(socket.SHUT_WR)
        assert wait_until(lambda: desk.endpoint.events.qsize() == 1)
        # What asks whether it is there, which HTTP/1.0 does not know.
        found = line.recv(65536) if version == "1.1" else b""
        listen_again(desk)
        found += b"".join(iter(lambda: line.recv(65536), b""))
    asked, answer = found.split(b"HTTP/1.1 200")
    assert asked == asked.count(b"100") * b"HTTP/1.1 100 \r\n\r\n"
    assert b'"content": ' in answer


@pytest.mark.parametrize("how", ["closes", "resets"])
def test_a_client_that_has_gone_waits_no_more(desk_with, how):
    desk = desk_with()
    silence(desk)
    with asking(desk) as line:
        assert wait_until(lambda: desk.endpoint.events.qsize() == 1)
        if how == "resets":
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    call = desk.endpoint.events.get()
    assert wait_until(lambda: call.is_gone)
    listen_again(desk)


def test_calls_that_wait_when_their_episode_ends_are_refused(desk_with):
    desk = desk_with()
    calls = calls_that_wait(desk, 2)
    desk.endpoint.close_key(desk.key)
    answers = [call.result() for call in calls]
    assert [error_of(answer) for answer in answers] == [(409, "episode_over")] * 2
    assert {answer.headers["x-should-retry"] for answer in answers} == {"false"}


def test_headers_and_bodies_have_bounds_of_their_own(desk_with):
    desk = desk_with(max_header_bytes=4096, max_body_bytes=20_000)
    key = {"authorization": f"Bearer {desk.key}"}
    url = f"{desk.endpoint.base_url}/chat/completions"

    def post(content, **headers):
        kind = {"content-type": "application/json"}
        return httpx.post(url, content=content, headers={**kind, **key, **headers})

    whole = body_of()
    assert post(whole + b" " * (20_000 - len(whole))).status_code == 200
    large = b" " * 10_000_000  # more than a connection holds on its way
    assert error_of(post(large)) == (413, "too_large")
    assert error_of(post(iter([large]))) == (413, "too_large")
    assert error_of(post(whole, x="y" * 3000, z="y" * 1000)) == (431, "headers_too_large")


def test_bodies_that_wait_are_bounded_together(desk_with):
    desk = desk_with(max_held_bytes=1000)
    answer = desk.post(messages=[{"role": "user", "content": "x" * 1000}])
    assert error_of(answer) == (429, "rate_limit_exceeded")
    assert answer.headers["x-should-retry"] == "true"
    for _ in range(20):  # what was answered is held no more
        assert desk.post().status_code == 200


def post_part(desk, num_bytes, *, of, key):
    """The first line of the answer to a request of which a part is sent."""
    port = desk.endpoint.server.port
    with connect(port) as line:
        head = (
            "POST /v1/chat/completions HTTP/1.1",
            f"host: 127.0.0.1:{port}",
            f"x-api-key: {key}",
        )
        line.sendall("\r\n".join((*head, f"content-length: {of}", "", "")).encode())
        line.sendall(b" " * num_bytes)
        return line.recv(65536).partition(b"\r\n")[0]


def test_a_large_body_without_a_key_is_not_read_to_its_end(desk_with):
    told = post_part(desk_with(), 200_000, of=1_000_000, key="sk-x")
    assert told == b"HTTP/1.1 401 "


def test_a_refused_client_that_is_still_sending_is_told_why(desk_with):
    desk = desk_with(max_body_bytes=20_000)
    # More than a connection holds on its way: all of it is taken, and thrown away.
    told = post_part(desk, 30_000_000, of=30_000_000, key=desk.key)
    assert told == b"HTTP/1.1 413 "


def test_the_documented_limits_are_the_true_ones():
    own, page = HttpLimits(), (ROOT / "docs" / "agents.md").read_text()
    for what, value in (
        ("request line and headers", f"{own.max_header_bytes >> 10} KiB"),
        ("body", f"{own.max_body_bytes >> 20} MiB"),
        ("bodies of all calls that wait", f"{own.max_held_bytes >> 20} MiB"),
        ("calls of a rank that wait", f"{own.max_waiting}"),
        ("connections of a rank", f"{own.max_connections}"),
        ("until a request has arrived", f"{own.read_seconds:g} s"),
        ("until an answer has been taken", f"{own.write_seconds:g} s"),
        ("between two requests of a connection", f"{own.idle_seconds:g} s"),
    ):
        assert f"\n| {what} | {value} |" in page
    assert f"{own.call_seconds:g} s of `lightrft serve`" in page
    for what, size in (
        ("body for a model that reads images", MEDIA_LIMITS.max_body_bytes),
        (
            "bodies of all calls that wait for a model that reads images",
            MEDIA_LIMITS.max_held_bytes,
        ),
    ):
        assert f"\n| {what} | {size >> 20} MiB |" in page
    assert f"| {MAX_IMAGES}, and {MAX_PIXELS} pixels together |" in page
    assert f"{MAX_KEPT_BYTES >> 20} MiB | 413 `episode_too_large`" in page

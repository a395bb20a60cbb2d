"""The reward server against clients that are slow, large, unknown or wrong."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from tests.machine import seconds
from tests.rewards.asking import results_of

from lightrft.rewards.build import build_reward
from lightrft.rewards.types import RewardError, RewardResult
from lightrft.tools.rewards.remote import TOKEN_VARIABLE, RemoteReward
from lightrft.tools.rewards.service import RewardServer, ServiceLimits

JSON_HEAD = b"POST / HTTP/1.1\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"responses": ["a", "bc"]}).encode()


class Lengths:
    name = "lengths"
    needs_labels = False

    def __init__(self, wait=None):
        self.wait = wait
        self.num_calls = 0

    def score(self, prompts, responses, labels, columns):
        self.num_calls += 1
        if self.wait is not None:
            self.wait.wait(20)
        return [RewardResult(float(len(r))) for r in responses]

    def close(self):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(reward=None, *, token=None, **limits):
        server = RewardServer(reward or Lengths(), token=token, limits=ServiceLimits(**limits))
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def connect(server):
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=seconds(20))


def send(server, data):
    """Everything that the server answers to some bytes."""
    with connect(server) as connection:
        connection.sendall(data)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


def post(body=BODY, *headers, content_type="application/json"):
    lines = ["POST / HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    lines += [f"Content-Type: {content_type}"] if content_type else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def status_of(answer):
    return int(answer.split(b" ")[1])


def test_250_slow_connections_hold_no_thread_and_nobody_up(serve):
    server = serve(read_seconds=60)
    assert status_of(send(server, post())) == 200
    before = threading.active_count()
    slow = [connect(server) for _ in range(250)]
    try:
        for number, connection in enumerate(slow):
            # In the head, in the body, or silent.
            connection.sendall((b"POST / HT", post()[:-5], b"")[number % 3])
        assert status_of(send(server, post())) == 200
        assert threading.active_count() <= before + 1
    finally:
        for connection in slow:
            connection.close()


def test_what_a_reward_cannot_decide_reaches_the_client_as_such(serve):
    class Unsure(Lengths):
        def score(self, prompts, responses, labels, columns):
            return [None, *(RewardResult(1.0, {"style": each}) for each in columns["style"][1:])]

    server = serve(Unsure())
    body = json.dumps({"responses": ["a", "bc"], "style": [0.25, 0.5]}).encode()
    answer = json.loads(send(server, post(body)).partition(b"\r\n\r\n")[2])
    assert answer == {
        "rewards": [None, 1.0],
        "components": {"style": [None, 0.5]},
        "undecided": "reward 'lengths' could not decide them within its limits",
    }
    reward = RemoteReward(f"http://127.0.0.1:{server.server_port}/", timeout_seconds=30)
    found = results_of(reward, ["a", "b"], style=[0.25, 0.5])
    assert found == [None, RewardResult(1.0, {"remote": 1.0, "style": 0.5})]
    assert results_of(reward, ["a"], style=[0.25]) == [None]


@pytest.mark.parametrize("part", [b"", b"POST / HTTP/1.1\r\nHost:", post()[:-3]])
def test_a_client_that_stops_is_let_go(serve, part):
    answer = send(serve(read_seconds=0.3), part)
    assert status_of(answer) == 408
    assert b"longer than 0.3 s" in answer


def test_a_client_that_drips_is_let_go(serve):
    server = serve(read_seconds=0.5)
    with connect(server) as connection:
        start = time.monotonic()
        with pytest.raises(OSError):
            for byte in post(b" " * 100_000):
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
                assert time.monotonic() - start < seconds(15)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post(b"[" * 200_000), 400),
        (post(b'{"a":' * 30_000), 400),
        (post(b'{"responses": [NaN]}'), 400),
        (post(b'{"responses": [' + b"9" * 6000 + b"]}"), 400),
        (post(b"[1]"), 400),
        (post(b"\xff\xfe"), 400),
        (post(b'{"responses": "text"}'), 400),
        (post(b'{"responses": ["a"], "labels": []}'), 400),
        (post(b"x" * 200_001), 413),
        (JSON_HEAD + b"Content-Length: 99999999999999\r\n\r\n", 413),
        (JSON_HEAD + b"Content-Length: 0\r\n\r\n", 413),
        (JSON_HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (JSON_HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (JSON_HEAD + b"Content-Length: \xb2\r\n\r\n", 400),
        (JSON_HEAD + b"Content-Length: " + b"9" * 100 + b"\r\n\r\n", 400),
        (JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n", 411),
        (b"GET / HTTP/1.1\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\n" + b"X: a\r\n" * 200 + b"\r\n", 431),
    ],
)
def test_bad_requests_get_a_status_and_the_next_one_its_rewards(serve, request_bytes, status):
    server = serve(max_body_bytes=200_000)
    answer = send(server, request_bytes)
    assert status_of(answer) == status
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    good = send(server, post())
    assert json.loads(good.partition(b"\r\n\r\n")[2])["rewards"] == [1.0, 2.0]


def test_requests_beyond_what_may_wait_or_be_held_are_told_to_come_again(serve):
    release, reward = threading.Event(), None
    reward = Lengths(release)
    server = serve(reward, max_waiting=2, max_held_bytes=50_000)
    waiting = [connect(server) for _ in range(2)]
    try:
        for connection in waiting:
            connection.sendall(post())
        deadline = time.monotonic() + seconds(20)
        while server.num_waiting < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        answer = send(server, post())
        assert status_of(answer) == 503
        assert b"Retry-After: 1" in answer
        assert status_of(send(server, post(b" " * 60_000))) == 503
        release.set()
        for connection in waiting:
            assert status_of(connection.recv(65536)) == 200
    finally:
        release.set()
        for connection in waiting:
            connection.close()
    assert reward.num_calls == 2
    assert status_of(send(server, post())) == 200


def test_too_many_connections_are_turned_away(serve):
    server = serve(max_connections=3, read_seconds=60)
    held = [connect(server) for _ in range(3)]
    deadline = time.monotonic() + seconds(20)
    while server.num_connections < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert status_of(send(server, post())) == 503
    for connection in held:
        connection.close()


def test_a_token_is_asked_for_before_anything_is_read(serve, monkeypatch):
    reward = Lengths()
    server = serve(reward, token="hunter2")
    url = f"http://127.0.0.1:{server.server_port}/"
    wrong = [
        (),
        ("Authorization: Bearer hunter",),
        ("Authorization: hunter2",),
        ("Authorization: Bearer \xfc",),
    ]
    for headers in wrong:
        answer = send(server, post(b" " * 300_000, *headers))
        assert status_of(answer) == 401
        assert b"hunter" not in answer
    with pytest.raises(RewardError, match=r"status 401, .*wrong or no token"):
        results_of(RemoteReward(url), ["x" * 5_000_000])
    assert reward.num_calls == 0
    by_option = results_of(RemoteReward(url, token="hunter2"), ["abc"])
    monkeypatch.setenv(TOKEN_VARIABLE, "hunter2")
    by_environment = results_of(RemoteReward(url), ["abc"])
    assert [r.reward for r in (*by_option, *by_environment)] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("headers", "content_type", "status"),
    [
        ((), "text/plain", 415),
        ((), "application/x-www-form-urlencoded", 415),
        ((), None, 415),
        (("Origin: http://site.example",), "application/json", 403),
        (("Origin: null",), "text/plain", 403),
        ((), "application/json; charset=utf-8", 200),
    ],
)
def test_sites_in_a_browser_are_not_answered_without_a_token(serve, headers, content_type, status):
    request = post(BODY, *headers, content_type=content_type)
    assert status_of(send(serve(), request)) == status
    right = post(BODY, *headers, "Authorization: Bearer t", content_type=content_type)
    assert status_of(send(serve(token="t"), right)) == 200


def test_a_column_that_is_nested_deeply_is_refused_in_one_line(serve, tmp_path, capfd):
    file = tmp_path / "r.py"
    file.write_text("def size(responses, **columns):\n    return [len(r) for r in responses]\n")
    with build_reward([f"{file}:size"]) as reward:
        server = serve(reward)
        statuses = set()
        for depth in range(400, 1000, 20):
            column = b"[" * depth + b"]" * depth
            answer = send(server, post(b'{"responses": ["a"], "column": [%s]}' % column))
            statuses.add(status_of(answer))
            assert b"\n" not in answer.partition(b"\r\n\r\n")[2]
        assert statuses <= {200, 400}
        assert status_of(send(server, post())) == 200
    assert capfd.readouterr().err == ""


def test_a_client_that_asks_first_is_told_to_go_on(serve):
    with connect(serve()) as connection:
        head, _, body = post(BODY, "Expect: 100-continue").partition(b"\r\n\r\n")
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")

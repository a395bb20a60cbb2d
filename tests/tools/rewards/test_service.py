"""The reward server against clients that are slow, unknown or wrong; see `test_endpoint_limits`."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from tests.machine import seconds, wait_until
from tests.rewards.asking import results_of

from lightrft.rewards.build import build_reward
from lightrft.rewards.types import RewardError, RewardResult
from lightrft.tools.rewards.remote import TOKEN_VARIABLE, RemoteReward
from lightrft.tools.rewards.service import LIMITS, RewardServer

JSON = {"content-type": "application/json"}
BODY = json.dumps({"responses": ["a", "bc"]}).encode()


class Lengths:
    name = "lengths"
    needs_labels = False
    num_calls = 0

    def score(self, prompts, responses, labels, columns):
        self.num_calls += 1
        return [RewardResult(float(len(r))) for r in responses]

    def close(self):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(reward=None, *, token=None, **limits):
        limits = replace(LIMITS, **limits)
        servers.append(RewardServer(reward or Lengths(), token=token, limits=limits))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def post(server, body=BODY, headers=JSON):
    return httpx.post(server.http.address, content=body, headers=headers, timeout=seconds(30))


def test_slow_connections_hold_no_thread_and_nobody_up_and_are_let_go(serve):
    limit = seconds(1)
    server = serve(read_seconds=limit, idle_seconds=limit)
    before = threading.active_count()
    address = ("127.0.0.1", server.http.port)
    slow = [socket.create_connection(address, timeout=seconds(30)) for _ in range(250)]
    for number, connection in enumerate(slow):
        # In the head, in the body, or silent.
        whole = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall((whole[:9], whole + b"content-length: 9\r\n\r\n{", b"")[number % 3])
    assert post(server).status_code == 200
    assert threading.active_count() <= before + 1
    for number, connection in enumerate(slow):
        with connection:
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408 ") == (number % 3 < 2)


def test_what_a_reward_cannot_decide_reaches_the_client_as_such(serve):
    class Unsure(Lengths):
        def score(self, prompts, responses, labels, columns):
            return [None, *(RewardResult(1.0, {"style": each}) for each in columns["style"][1:])]

    server = serve(Unsure())
    body = json.dumps({"responses": ["a", "bc"], "style": [0.25, 0.5]}).encode()
    assert post(server, body).json() == {
        "rewards": [None, 1.0],
        "components": {"style": [None, 0.5]},
        "undecided": "reward 'lengths' could not decide them within its limits",
    }
    reward = RemoteReward(server.http.address, timeout_seconds=30)
    found = results_of(reward, ["a", "b"], style=[0.25, 0.5])
    assert found == [None, RewardResult(1.0, {"remote": 1.0, "style": 0.5})]
    assert results_of(reward, ["a"], style=[0.25]) == [None]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 200_000,
        b'{"a":' * 30_000,
        b'{"responses": [NaN]}',
        b'{"responses": [' + b"9" * 6000 + b"]}",
        b"[1]",
        b"\xff\xfe",
        b'{"responses": "text"}',
        b'{"responses": ["a"], "labels": []}',
        b"x" * 200_001,
    ],
)
def test_bad_requests_get_a_status_and_the_next_one_its_rewards(serve, body):
    server = serve(max_body_bytes=200_000)
    answer = post(server, body)
    assert answer.status_code == (413 if len(body) > 200_000 else 400)
    assert answer.json()["error"]["message"]
    assert httpx.get(server.http.address).status_code == 405
    assert post(server).json()["rewards"] == [1.0, 2.0]


@pytest.mark.parametrize("error", [KeyError("a bug"), TimeoutError("a bug")])
def test_a_bug_of_a_reward_is_a_500_whose_traceback_the_server_shows(serve, caplog, error):
    class Broken(Lengths):
        def score(self, *request):
            raise error

    assert post(serve(Broken())).status_code == 500
    assert "reward 'lengths' failed\nTraceback" in caplog.text
    assert f"{type(error).__name__}: {error}" in caplog.text


def test_the_query_of_an_address_is_its_callers(serve):
    reward = RemoteReward(f"{serve().http.address}/?key=a%20b..c")
    assert [r.reward for r in results_of(reward, ["abc"])] == [3.0]


def test_requests_are_scored_one_by_one_and_those_beyond_the_bound_come_again(serve):
    release, begun = threading.Event(), threading.Semaphore(0)

    class Waits(Lengths):
        def score(self, *request):
            begun.release()
            assert release.wait(seconds(20))
            return super().score(*request)

    server = serve(reward := Waits(), max_waiting=2)
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(post, server) for _ in range(2)]
        assert wait_until(lambda: server.http.num_waiting == 2)
        assert begun.acquire(timeout=seconds(20))
        assert not begun.acquire(blocking=False)
        refused = post(server)
        release.set()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert [call.result().status_code for call in calls] == [200] * 2
    assert post(server).status_code == 200
    assert reward.num_calls == 3


def test_a_token_is_asked_for_before_anything_is_read(serve, monkeypatch):
    reward = Lengths()
    server = serve(reward, token="hunter2")
    for wrong in ({}, {"authorization": "Bearer hunter"}, {"authorization": "hunter2"}):
        answer = post(server, b" " * 300_000, {**JSON, **wrong})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "hunter" not in answer.text
    assert post(server, BODY, {"authorization": "Bearer \xfc".encode()}).status_code == 401
    with pytest.raises(RewardError, match=r"status 401, .*wrong or no token"):
        results_of(RemoteReward(server.http.address), ["x" * 5_000_000])
    assert reward.num_calls == 0
    by_option = results_of(RemoteReward(server.http.address, token="hunter2"), ["abc"])
    monkeypatch.setenv(TOKEN_VARIABLE, "hunter2")
    by_environment = results_of(RemoteReward(server.http.address), ["abc"])
    assert [r.reward for r in (*by_option, *by_environment)] == [3.0, 3.0]


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
        ({"origin": "http://site.example", **JSON}, 403),
        ({"origin": "null", "content-type": "text/plain"}, 403),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_sites_in_a_browser_are_not_answered_without_a_token(serve, headers, status):
    assert post(serve(), BODY, headers).status_code == status
    right = {**headers, "authorization": "Bearer t"}
    assert post(serve(token="t"), BODY, right).status_code == 200


def test_a_column_that_is_nested_deeply_is_refused_in_one_line(serve, tmp_path, capfd):
    file = tmp_path / "r.py"
    file.write_text("def size(responses, **columns):\n    return [len(r) for r in responses]\n")
    with build_reward([f"{file}:size"]) as reward:
        server = serve(reward)
        statuses = set()
        for depth in range(400, 1000, 20):
            column = b"[" * depth + b"]" * depth
            answer = post(server, b'{"responses": ["a"], "column": [%s]}' % column)
            statuses.add(answer.status_code)
            assert "\n" not in answer.text
        assert statuses <= {200, 400}
        assert post(server).status_code == 200
    assert capfd.readouterr().err == ""

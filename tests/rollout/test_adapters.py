"""Environments of other makes: classes that answer whole turns, and servers of OpenEnv."""

import http
import json
import math
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from tests.machine import seconds
from tests.rollout.stages import CASES, TEXT, call
from tests.tools.rewards.test_http import Raw, dripping
from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.sync.server import serve

from lightrft.config import TrainConfig
from lightrft.rewards.types import RewardError
from lightrft.rewards.worker import ReportedError
from lightrft.rollout.environments.worker import EpisodeLostError, HostedEnvironments
from lightrft.run.resume import input_files
from lightrft.tools.environments.openenv import ActionRefusedError, connect
from lightrft.tools.environments.skyrl_gym import converse


def test_a_skyrl_gym_class_is_answered_turn_by_turn_as_a_user_answers(stage):
    played = stage(["3", "5", "7"], environment=f"skyrl_gym:{TEXT}:Countdown")
    rollouts, rewards = played.sample()
    for rollout, reward in zip(rollouts, rewards, strict=True):
        assert rollout.prompt.text.endswith("Find it. Guess!<|im_end|>\n<|im_start|>assistant\n")
        assert "tools" not in rollout.prompt.text
        frame = "<|im_end|>\n<|im_start|>user\nnot {} <|im_end|>\ntry again<|im_end|>\n"
        frame += "<|im_start|>assistant\n"
        assert played.text(rollout) == "3" + frame.format(3) + "5" + frame.format(5) + "7<|im_end|>"
        assert reward.reward == pytest.approx(0.5)
        assert reward.components == {"Countdown": 0.5}
        ends = rollout.completion.output_token_ids.count(played.tokenizer.eos_token_id)
        assert ends == 5  # what the environment said forged none
    played.check_rows(rollouts)


def test_extras_have_what_skyrls_generator_gives_and_seeds(stage):
    played = stage(["3", "7"], environment=f"skyrl_gym:{TEXT}:Telling", max_turns=5)
    (first, second), _ = played.sample()
    told = [json.loads(r.prompt.messages[-1]["content"].partition("!")[2]) for r in (first, second)]
    assert [each["max_turns"] for each in told] == [5, 5]
    assert told[0]["seed"] == told[1]["seed"] != told[0]["sample_seed"] != told[1]["sample_seed"]
    rows = [{"input": "Find it.", "target": 7, "max_turns": 2, "seed": 11}]
    played = stage(["7"], environment=f"skyrl_gym:{TEXT}:Telling", rows=rows)
    told = json.loads(played.sample()[0][0].prompt.messages[-1]["content"].partition("!")[2])
    assert (told["max_turns"], told["seed"]) == (2, 11)


def test_the_last_turn_is_paid_although_nothing_follows_it(stage):
    played = stage(["1", "7"], environment=f"skyrl_gym:{TEXT}:Countdown", max_turns=2)
    rollouts, rewards = played.sample()
    assert rewards[0].reward == 0.75
    played = stage(["1"], environment=f"skyrl_gym:{TEXT}:Countdown", max_turns=2)
    rollouts, rewards = played.sample()
    assert rewards[0].reward == -0.5
    assert len(rollouts[0].segments) == 2
    assert rollouts[0].completion.sampled[-1]
    played = stage(["1234567"], environment=f"skyrl_gym:{TEXT}:Countdown")
    rollouts, rewards = played.sample(max_tokens=3)  # cut by length
    assert (rollouts[0].conversation.turns, rewards[0].reward) == (("123",), -0.25)


def test_calls_in_a_conversation_are_only_text(stage):
    text = call("guess", number=7)
    played = stage([text, "7"], environment=f"skyrl_gym:{TEXT}:Countdown")
    rollouts, rewards = played.sample()
    assert f"not {text} <|im_end|>\ntry again" in played.text(rollouts[0])
    assert rewards[0].reward == 0.75


@pytest.mark.parametrize(
    "said, reason",
    [
        ("raise", "step raised ValueError: bang"),
        ("wrong form", "must return observations, reward"),
        ("rewrite", "postprocessed_action 're': .* is trained as it was"),
    ],
)
def test_a_step_that_fails_fails_its_episode(stage, said, reason):
    with pytest.raises(RewardError, match=reason):
        stage([said], environment=f"skyrl_gym:{TEXT}:Countdown").sample()
    played = stage([said], environment=f"skyrl_gym:{TEXT}:Countdown", reward_failure="mask")
    assert played.sample()[1] == [None, None]


def test_every_episode_is_closed_once_failed_or_not(stage, tmp_path):
    rows = [
        {"input": "Find it.", "target": target, "log": str(tmp_path / "log")} for target in (7, 8)
    ]
    options = {"rows": rows, "reward_failure": "mask"}
    stage(["raise"], environment=f"skyrl_gym:{TEXT}:Countdown", **options).sample()
    stage(["7", "8"], environment=f"skyrl_gym:{TEXT}:Countdown", **options).sample()
    closed = sorted((tmp_path / "log").read_text().splitlines())
    assert closed == ["['7', '8']"] * 2 + ["['7']"] * 2 + ["['raise']"] * 4


def test_an_init_that_asks_something_else_is_refused(stage):
    with pytest.raises(RewardError, match="init must return the prompt"):
        stage(["1"], environment=f"skyrl_gym:{TEXT}:Moving").sample()


def test_ids_of_skyrl_gym_are_its_classes_with_their_options(monkeypatch):
    with pytest.raises(ReportedError, match=r"missing .*pip install skyrl-gym, or give FILE"):
        converse("countdown")
    spec = SimpleNamespace(entry_point="json:JSONDecoder", kwargs={})
    known = {"countdown": SimpleNamespace(entry_point=Registered, kwargs={"depth": 3}), "no": spec}
    registration = SimpleNamespace(registry=known)
    monkeypatch.setitem(sys.modules, "skyrl_gym.envs.registration", registration)
    episode = converse("countdown")({"url": "x"})
    assert episode.reset(prompt=[{"role": "user", "content": "q"}], seed=4) == " 3 x 4"
    with pytest.raises(ReportedError, match="or one of the ids countdown, no"):
        converse("other")
    with pytest.raises(ReportedError, match="expected a class with init"):
        converse("no")


class Registered:
    def __init__(self, env_config, extras, depth):
        self.told = f" {depth} {env_config.url} {extras['seed']}"

    def init(self, prompt):
        return [{**prompt[0], "content": prompt[0]["content"] + self.told}], {}

    def step(self, action):
        raise NotImplementedError

    def close(self):
        pass


@pytest.mark.parametrize(
    "text, tools, message",
    [
        (f"skyrl_gym:{TEXT}:NoStep", (), "expected a class with init"),
        (f"skyrl_gym:{TEXT}:Missing", (), "has no 'Missing'"),
        (f"skyrl_gym:{TEXT}:Countdown", (f"{CASES}:double",), "no tools"),
        ("openenv:nowhere", (), "expected http://HOST:PORT"),
        ("openenv:http://127.0.0.1:9", (), "does not describe its actions"),
    ],
)
def test_what_cannot_be_adapted_is_refused_at_the_start(text, tools, message, monkeypatch):
    monkeypatch.setattr("lightrft.tools.environments.openenv.CONNECT_SECONDS", seconds(1.0))
    with pytest.raises(ReportedError, match=message):
        HostedEnvironments(text, tools, 1000).describe()


def test_the_file_of_an_adapted_class_is_part_of_what_a_continued_run_compares():
    config = TrainConfig(environment=f"skyrl_gym:{TEXT}:Countdown", apply_chat_template=True)
    assert TEXT in input_files(config)


DEEP = b"[" * 10**5
ANSWERED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    "answer, message",
    [
        (dripping(ANSWERED % 10**6, b" "), "gave no answer within"),
        (b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n", "redirect"),
        (ANSWERED % len(DEEP) + DEEP, "nested too deeply"),
        (b"nothing\r\n\r\n", "no HTTP answer"),
        (ANSWERED % 15 + b'{"action": [1]}', "expected an OpenEnv server"),
    ],
    ids=["drips", "elsewhere", "deep", "no HTTP", "no actions"],
)
def test_a_server_that_does_not_describe_its_actions_is_one_line(answer, message, monkeypatch):
    monkeypatch.setattr("lightrft.tools.environments.openenv.CONNECT_SECONDS", seconds(1.0))
    elsewhere = Raw(ANSWERED % 2 + b"{}")
    if isinstance(answer, bytes):
        answer = answer.replace(b"%s", elsewhere.url.encode())
    servers = [Raw(answer), elsewhere]
    try:
        with pytest.raises(ReportedError, match=message) as caught:
            connect(f"http://127.0.0.1:{servers[0].port}")
    finally:
        for each in servers:
            each.close()
    assert "\n" not in str(caught.value)
    assert elsewhere.requests == []


SCHEMA = {
    "action": {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}},
        "required": ["number"],
    }
}


REWARDS = {"no number": "much", "not finite": math.inf, "too large": 10**400}


class Server:
    """A server that speaks OpenEnv's wire, and its faults on demand.

    Args:
        fault: What goes wrong at the second message of a session.
    """

    def __init__(self):
        self.fault, self.sessions, self.lock = None, [], threading.Lock()
        self.schema = SCHEMA
        self.room = threading.Semaphore(100)
        self.server = serve(self.session, "127.0.0.1", 0, process_request=self.describe)
        self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"
        self.name = f"openenv:{self.url}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def describe(self, connection, request):
        if request.path != "/schema":
            return None
        body = json.dumps(self.schema).encode()
        headers = Headers({"Content-Length": str(len(body)), "Connection": "close"})
        return Response(http.HTTPStatus.OK, "OK", headers, body)

    def session(self, connection):
        if not self.room.acquire(blocking=False):
            details = {"message": "Server at capacity", "code": "CAPACITY_REACHED"}
            connection.send(json.dumps({"type": "error", "data": details}))
            return
        try:
            self.play(connection)
        finally:
            self.room.release()

    def play(self, connection):
        state = {"episode_id": None, "step_count": 0}
        with self.lock:
            self.sessions.append(state)
        for number, raw in enumerate(connection):
            asked = json.loads(raw)
            state.setdefault("asked", []).append(asked)
            fault = self.fault if number == 2 else None  # after reset and state
            if fault == "cut":
                return
            if fault == "slow":
                time.sleep(3.0)
            if fault == "noise":
                connection.send("<html>")
            elif fault == "large":
                connection.send("x" * (2 << 20))
            elif fault in ("SESSION_ERROR", "VALIDATION_ERROR", "EXECUTION_ERROR"):
                details = {"message": "told", "code": fault}
                connection.send(json.dumps({"type": "error", "data": details}))
            elif fault == "error of no form":
                connection.send(json.dumps({"type": "error", "data": ["told"]}))
            elif fault in REWARDS:
                data = {"observation": {}, "reward": REWARDS[fault]}
                connection.send(json.dumps({"type": "observation", "data": data}))
            elif fault == "deep":
                connection.send("[" * 10**5)
            elif asked["type"] == "state":
                shown = {"episode_id": state["episode_id"], "step_count": state["step_count"]}
                if self.fault == "another episode" and number > 1:
                    shown["episode_id"] = None
                if self.fault in ("no name", "another count"):
                    shown["episode_id"] = ""
                if self.fault in ("another count", "own count") and number > 1:
                    shown["step_count"] += 1
                if self.fault == "own names":
                    shown = {
                        "episode_id": f"mine {id(state)}",
                        "step_count": shown["step_count"] + 3,
                    }
                connection.send(json.dumps({"type": "state", "data": shown}))
            else:
                connection.send(json.dumps(self.observed(state, asked)))

    def observed(self, state, asked):
        if asked["type"] == "reset":
            state |= {"episode_id": asked["data"]["episode_id"], "target": asked["data"]["target"]}
            return {"type": "observation", "data": {"observation": {"text": "guess"}}}
        state["step_count"] += 1
        is_right = asked["data"]["number"] == state["target"]
        data = {"observation": {"text": f"{is_right}", "reward": 9.0, "metadata": {}}}
        data |= {"reward": is_right or -0.25, "done": is_right}  # of OpenEnv also truth values
        return {"type": "observation", "data": data}


@pytest.fixture
def server():
    running = Server()
    yield running
    running.server.shutdown()
    running.thread.join(10.0)


def test_actions_of_an_openenv_server_are_calls_of_a_tool(stage, server):
    turns = [call("step", number=1), call("step", number=7), "never said"]
    played = stage(turns, environment=server.name)
    rollouts, rewards = played.sample()
    for rollout, reward in zip(rollouts, rewards, strict=True):
        assert '"name": "step"' in rollout.prompt.text
        assert "metadata" not in rollout.prompt.text
        assert 'Find it.\n{"text": "guess"}<|im_end|>' in rollout.prompt.text
        assert '<tool_response>\n{"text": "False"}\n</tool_response>' in played.text(rollout)
        assert len(rollout.conversation.turns) == 2  # done ends the episode
        assert played.text(rollout).endswith('{"number": 7}}\n</tool_call><|im_end|>')
        assert reward.reward == 0.75
    ids = [session["episode_id"] for session in server.sessions]
    assert len(set(ids)) == len(ids) == 2
    assert all(session["step_count"] == 2 for session in server.sessions)
    asked = [session["asked"][0]["data"] for session in server.sessions]
    assert all(data["input"] == "Find it." for data in asked)
    assert len({data["seed"] for data in asked}) == 1  # of the prompt
    assert all("max_turns" not in data for data in asked)


def test_episodes_wait_while_a_server_has_no_room_and_none_is_lost(stage, server):
    server.room = threading.Semaphore(1)
    turns = [call("step", number=1), call("step", number=7), "never said"]
    rows = [{"input": f"Find it {i}.", "target": 7} for i in range(4)]
    played = stage(turns, environment=server.name, rows=rows)
    rollouts, rewards = played.sample()
    assert [rollout.sample_id for rollout in rollouts] == list(range(8))
    assert [reward.reward for reward in rewards] == [0.75] * 8
    assert len(server.sessions) == 8


def test_episodes_fail_where_a_server_never_has_room(stage, server):
    server.room = threading.Semaphore(0)
    played = stage(["x"], environment=server.name, tool_timeout_seconds=1.0)
    with pytest.raises(RewardError, match=r"reset failed: OpenEnv at .*: Server at capacity"):
        played.sample()


def begun(server):
    episode = connect(server.url)()
    episode.reset(target=7, input="Find it.")
    return episode


FAULTS = ("cut", "slow", "noise", "large", "SESSION_ERROR", "error of no form")


@pytest.mark.parametrize("fault", [*FAULTS, "deep", *REWARDS])
def test_an_episode_ends_with_its_connection(server, fault, monkeypatch):
    """OpenEnv's client would step on in a new environment, and be paid for it."""
    monkeypatch.setattr("lightrft.tools.environments.openenv.MESSAGE_SECONDS", 1.0)
    server.fault = fault
    episode = begun(server)
    with pytest.raises(EpisodeLostError, match="the episode is lost"):
        episode.step(number=7)
    server.fault = None
    for again in (lambda: episode.step(number=7), episode.get_reward):
        with pytest.raises(EpisodeLostError, match="its connection is closed"):
            again()
    assert len(server.sessions) == 1


@pytest.mark.parametrize("fault", ["VALIDATION_ERROR", "EXECUTION_ERROR"])
def test_a_refused_action_is_told_and_the_episode_goes_on(server, fault):
    server.fault = fault
    episode = begun(server)
    with pytest.raises(ActionRefusedError, match="told"):
        episode.step(number=1)
    assert episode.step(number=7) == '{"text": "True"}'
    assert episode.is_done
    with pytest.raises(ActionRefusedError, match="has ended"):
        episode.step(number=7)
    assert episode.get_reward() == 1.0


@pytest.mark.parametrize("fault", ["another episode", "another count"])
def test_a_reward_of_another_episode_does_not_count(server, fault):
    server.fault = fault
    episode = begun(server)
    episode.step(number=7)
    with pytest.raises(EpisodeLostError, match="the server answers for episode"):
        episode.get_reward()


@pytest.mark.parametrize("habit", ["own names", "own count", "no name"])
def test_a_server_names_and_counts_its_episodes_as_it_likes(server, habit):
    server.fault = habit
    episode = begun(server)
    episode.step(number=1)
    episode.step(number=7)
    assert episode.get_reward() == 0.75


def test_a_lost_episode_fails_instead_of_being_answered_by_an_error(stage, server):
    server.fault = "cut"
    played = stage([call("step", number=7)], environment=server.name)
    with pytest.raises(RewardError, match="step was not answered"):
        played.sample()

"""The reward service's protocol, its failures, and the server that comes along."""

import json
from contextlib import ExitStack, closing

import pytest
from tests.answering import answering
from tests.rewards.asking import results_of

from lightrft.config import TrainConfig
from lightrft.rewards import build_reward
from lightrft.rewards.types import RewardError, RewardResult
from lightrft.strategy.config import ConfigError
from lightrft.tools.rewards.remote import RemoteReward


@pytest.fixture
def serve():
    """A function of functions of a request, each of which gives the next answer."""
    with ExitStack() as servers:

        def start(*answers):
            seen = []

            def answer(path, headers, body):
                seen.append(json.loads(body))
                return answers[min(len(seen), len(answers)) - 1](seen[-1])

            return servers.enter_context(answering(answer)) + "/score", seen

        yield start


def lengths(request):
    return 200, {"rewards": [len(r) for r in request["responses"]]}


def ask(url, **options):
    columns = {"level": [3, 4], "environments": [object()] * 2}
    with closing(RemoteReward(url, **options)) as reward:
        return reward.score(["p1 ", "p2 "], ["a", "bcd"], ["1", None], columns)


def test_the_request_carries_queries_labels_and_columns(serve):
    url, seen = serve(lengths)
    assert ask(url) == [
        RewardResult(1.0, {"remote": 1.0}),
        RewardResult(3.0, {"remote": 3.0}),
    ]
    assert seen == [
        {
            "level": [3, 4],
            "queries": ["p1 a", "p2 bcd"],
            "prompts": ["p1 ", "p2 "],
            "responses": ["a", "bcd"],
            "labels": ["1", None],
            "references": ["1", None],
        }
    ]


def test_nobody_listening_is_named():
    with pytest.raises(RewardError, match=r"http://127.0.0.1:9/x gave no answer"):
        ask("http://user:secret@127.0.0.1:9/x", timeout_seconds=0.3)


@pytest.mark.parametrize(
    "answer, message",
    [
        ((400, b"no such model"), "/score: status 400, 'no such model'"),
        ((200, b"<html>"), "no JSON"),
        ((200, {"rewards": [1, None]}), "must answer 2 finite numbers"),
        ((200, {"rewards": [1, 2], "components": {"x": [1]}}), "under 'x'"),
    ],
)
def test_a_wrong_answer_is_an_error_at_once(serve, answer, message):
    url, seen = serve(lambda _: answer)
    with pytest.raises(RewardError, match=message):
        ask(url)
    assert len(seen) == 1


@pytest.mark.parametrize("url", ["reward.py", "ftp://host/x", "http://", "http://a,http://b"])
def test_an_address_is_checked_before_anything_runs(url):
    with pytest.raises(ConfigError, match="remote_rm_url"):
        build_reward([], config=TrainConfig(remote_rm_url=url))
    build_reward([], config=TrainConfig(remote_rm_url="http://a/x?next=b,http://c")).close()


def test_several_rewards_are_weighted_and_each_component_is_kept(serve, tmp_path):
    first, _ = serve(lengths)
    second, _ = serve(lambda _: (200, {"rewards": [10, 20]}))
    file = tmp_path / "r.py"
    file.write_text("def ones(responses):\n    return [1.0 for _ in responses]\n")
    config = TrainConfig(remote_rm_url=(first, second))
    with build_reward([f"{file}:ones"], weights=[100.0, 2.0, 0.5], config=config) as reward:
        found = results_of(reward, ["a", "bcd"])
    assert [r.reward for r in found] == [107.0, 116.0]
    assert found[1].components == {"ones": 1.0, "remote_0": 3.0, "remote_1": 20.0}
    with pytest.raises(ConfigError, match="expected 3 finite numbers"):
        build_reward([f"{file}:ones"], weights=[1.0], config=config)

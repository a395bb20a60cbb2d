"""TRL's signature: columns under their own names, and messages where prompts are messages."""

import pytest
from tests.runs import SMALL, tiny_models

from lightrft.config import TrainConfig
from lightrft.config.registry import REWARDS
from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion
from lightrft.records.rollout import AnsweredCall, ResponseTurns, Rollout
from lightrft.rewards import RewardError, build_reward
from lightrft.rollout.scoring import GroupScorer
from lightrft.trainer import train

SOURCE = """
def chat(prompts, completions, **kwargs):
    return [
        float(p[-1]["content"] == "Say 2." and c[0] == {"role": "assistant", "content": "2"})
        for p, c in zip(prompts, completions)
    ]

def text(prompts, completions, **kwargs):
    return [float(p == "rendered" and c == "2") for p, c in zip(prompts, completions)]

def both(responses, completions, prompts, labels):
    return [float(r == c[0]["content"]) for r, c in zip(responses, completions)]

def ours(prompts, responses, **kwargs):
    return [float(p == "rendered" and r == "2") for p, r in zip(prompts, responses)]

def called(completions):
    roles = [[message["role"] for message in c] for c in completions]
    return [float(each == ["assistant", "tool", "assistant"]) for each in roles]

def acc(completions, answer, **kwargs):
    return [float(c[-1]["content"] == str(a)) for c, a in zip(completions, answer)]
"""
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say 2."}]
CONFIG = TrainConfig(input_key="prompt", label_key="answer")


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """The path of the file, and the functions of this process."""
    path = tmp_path_factory.mktemp("rewards") / "trl.py"
    path.write_text(SOURCE)
    names: dict[str, object] = {}
    exec(SOURCE, names)
    return path, names


def rollout(prompt, conversation=None):
    """The response "2" to a row whose prompt is a text or messages."""
    is_chat = not isinstance(prompt, str)
    row = Prompt(0, "rendered", (1,), "2", {"prompt": prompt, "answer": 2})
    if is_chat:
        row = Prompt(0, "rendered", (1,), "2", row.columns, messages=tuple(prompt))
    completion = Completion(0, 0, (1,), (2,), (0.0,), "temperature", "stop")
    return Rollout(row, completion, 0, 0, "2", conversation=conversation)


def score(functions, name, sample, place="worker"):
    path, names = functions
    with REWARDS.lent({name: names[name]}):
        spelling = f"{path}:{name}" if place == "worker" else name
        with (
            build_reward([spelling], config=CONFIG) as reward,
            GroupScorer(reward, columns=("prompt", "answer")) as scorer,
        ):
            (result,) = scorer.results([sample])
    return result.reward


@pytest.mark.parametrize("place", ["worker", "here"])
@pytest.mark.parametrize(
    "name, prompt",
    [("chat", CHAT), ("text", "Say 2."), ("both", CHAT), ("ours", CHAT), ("acc", CHAT)],
)
def test_completions_are_messages_where_the_prompt_is_and_responses_are_texts(
    functions, name, prompt, place
):
    assert score(functions, name, rollout(prompt), place) == 1.0


def test_the_turns_of_an_episode_are_the_completion(functions):
    answer = AnsweredCall("add", {}, "ok", "2")
    turns = ResponseTurns(("I call", "2"), ((answer,), ()))
    assert score(functions, "called", rollout(CHAT, turns)) == 1.0


def test_without_a_rollout_the_response_is_one_message(functions):
    path, _ = functions
    with build_reward([f"{path}:chat"], config=CONFIG) as reward:
        (result,) = reward.score(["rendered"], ["2"], ["2"], {"prompt": [CHAT], "answer": [2]})
    assert result.reward == 1.0


def test_a_function_that_takes_messages_for_texts_is_told_so():
    with (
        REWARDS.lent({"upper": lambda completions: [c.upper() for c in completions]}),
        build_reward(["upper"], config=CONFIG) as reward,
        pytest.raises(RewardError, match="completions are messages here, since prompts are"),
    ):
        reward.score(["rendered"], ["2"], ["2"], {"prompt": [CHAT]})


def test_the_label_s_own_name_needs_labels(functions):
    path, _ = functions
    with build_reward([f"{path}:acc"], config=CONFIG) as reward:
        assert reward.needs_labels
    with build_reward([f"{path}:acc"]) as reward:
        assert not reward.needs_labels


def test_a_run_hands_the_label_and_the_messages_of_its_rows(tmp_path):
    seen = []

    def acc(prompts, completions, answer, question, **kwargs):
        seen.append((prompts[0], completions[0][0]["role"], answer[0], question[0]))
        return [float(len(c[0]["content"])) for c in completions]

    rows = [{"question": CHAT, "answer": n} for n in range(4)]
    train(
        str(tiny_models(tmp_path, "model") / "model"),
        rows,
        acc,
        input_key="question",
        label_key="answer",
        output_dir=str(tmp_path / "run"),
        apply_chat_template=True,
        max_steps=1,
        **SMALL,
    )
    assert sorted(answer for _, _, answer, _ in seen[-4:]) == [0, 1, 2, 3]
    assert all(each == (CHAT, "assistant", each[2], CHAT) for each in seen)

"""Mathematics rewards: gold answers, the grader in its process, deadlines and errors."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from lightrft.rewards import MathReward, RewardError, build_reward
from lightrft.rewards.math_rules import BOXED_MATH, GSM8K


def _scores(reward, responses: list[str], labels: list[str | None]) -> list[float]:
    results = reward.score(["prompt"] * len(responses), responses, labels, {})
    return [result.reward for result in results]


def _need_math_verify() -> None:
    # Not imported here: the trainer's process must do without it.
    if importlib.util.find_spec("math_verify") is None:
        pytest.skip("package math-verify is not installed")


@pytest.fixture(scope="module")
def boxed_math():
    """One grader for the module: its start costs seconds."""
    _need_math_verify()
    with build_reward(["boxed_math"]) as reward:
        yield reward


def test_every_gold_answer_of_gsm8k_scores_one(test_data) -> None:
    for split in ("test", "train"):
        lines = (test_data / "gsm8k" / f"{split}.jsonl").read_text().splitlines()
        labels = [json.loads(line)["answer"] for line in lines]
        boxed = [f"thus \\boxed{{{label.rsplit('####', 1)[1].strip()}}}." for label in labels]
        wrong = [f"thus \\boxed{{{i}.125}}" for i in range(len(labels))]
        with build_reward(["gsm8k"]) as reward:
            assert _scores(reward, boxed, labels) == [1.0] * len(labels)
            assert _scores(reward, labels, labels) == [1.0] * len(labels)  # the data's own style
            assert sum(_scores(reward, wrong, labels)) == 0.0


def test_only_the_response_counts_even_if_the_prompt_holds_the_answer() -> None:
    with build_reward(["gsm8k"]) as reward:
        results = reward.score([r"\boxed{18} #### 18"] * 2, ["garbage", "18"], ["18"] * 2, {})
    assert [result.reward for result in results] == [0.0, 0.0]
    assert results[0].components == {"gsm8k": 0.0, "timeout": 0.0}


def test_boxed_comes_before_hashes_in_gsm8k() -> None:
    with build_reward(["gsm8k"]) as reward:
        assert _scores(reward, [r"\boxed{1} #### 2"] * 2, ["1", "2"]) == [1.0, 0.0]


def test_plain_answers_start_no_grader() -> None:
    reward = MathReward(BOXED_MATH)
    responses = [r"\boxed{0.5}", r"\boxed{2}", "none", r"\boxed{x}", "\\boxed{" + "1+" * 999 + "1}"]
    assert _scores(reward, responses, ["1/2", "3", "3", "$x$", "1000"]) == [1, 0, 0, 1, 0]
    assert [worker.num_starts for worker in reward._workers] == [0, 0]
    assert "math_verify" not in sys.modules


def test_the_grader_decides_by_value(boxed_math) -> None:
    cases = [
        (r"\frac{1}{2}", "0.5", 1), (r"x^2+2x+1", "(x+1)^2", 1), (r"\sqrt{8}", r"2\sqrt{2}", 1),
        (r"18 \text{ dollars}", "18", 1), (r"\{2, 1\}", r"\boxed{\{1, 2\}}", 1),
        ("(2,1)", "(1,2)", 0), (r"\frac{", "3", 0), ("0.333", "1/3", 0), ("west", "east", 0),
    ]  # fmt: skip
    responses = [f"\\boxed{{{answer}}}" for answer, _, _ in cases]
    expected = [float(score) for _, _, score in cases]
    assert _scores(boxed_math, responses, [gold for _, gold, _ in cases]) == expected


def test_an_answer_that_hangs_the_grader_times_out_is_counted_and_harms_no_other() -> None:
    _need_math_verify()
    reward = MathReward(BOXED_MATH, grading_seconds=2.0, num_workers=1)
    try:
        responses = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\frac{1}{2}}"]
        results = reward.score(["p"] * 2, responses, ["3", "0.5"], {})
    finally:
        reward.close()
    assert [result.reward for result in results] == [0.0, 1.0]
    assert [result.components["timeout"] for result in results] == [1.0, 0.0]
    assert reward._workers[0].num_starts == 2


@pytest.mark.parametrize(
    ("rule", "label", "message"),
    [
        (BOXED_MATH, None, "needs a label and sample 1 has none: set --label_key"),
        (BOXED_MATH, " ", "label of sample 1: the label is empty"),
        (BOXED_MATH, "2 + 3\n#### 5", "got a worked solution.*use the reward gsm8k"),
        (GSM8K, "Paris", "label of sample 1: expected a number.*'Paris'"),
    ],
)
def test_unusable_labels_are_errors_that_name_the_sample(rule, label, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        _scores(MathReward(rule), [r"\boxed{1}"] * 2, ["1", label])

"""Mathematics rewards: gold answers, the grader in its process, deadlines and errors."""

import json
import sys
import time

import pytest
from tests.machine import seconds
from tests.rewards.asking import numbers_of, results_of

from lightrft.rewards import RewardError, RewardResult, build_reward
from lightrft.tools.rewards.math_rules import BOXED_MATH, GSM8K, MathReward, last_boxed


@pytest.fixture(scope="module")
def boxed_math():
    """One grader for the module: its start costs seconds."""
    with build_reward(["boxed_math"]) as reward:
        yield reward


def test_every_gold_answer_of_gsm8k_scores_one(test_data):
    for split in ("test", "train"):
        lines = (test_data / "gsm8k" / f"{split}.jsonl").read_text().splitlines()
        labels = [json.loads(line)["answer"] for line in lines]
        boxed = [f"thus \\boxed{{{label.rsplit('####', 1)[1].strip()}}}." for label in labels]
        wrong = [f"thus \\boxed{{{i}.125}}" for i in range(len(labels))]
        with build_reward(["gsm8k"]) as reward:
            assert numbers_of(reward, boxed, labels) == [1.0] * len(labels)
            assert numbers_of(reward, labels, labels) == [1.0] * len(labels)  # the data's own style
            assert sum(numbers_of(reward, wrong, labels)) == 0.0


def test_only_the_response_counts_even_if_the_prompt_holds_the_answer():
    with build_reward(["gsm8k"]) as reward:
        results = reward.score([r"\boxed{18} #### 18"] * 2, ["garbage", "18"], ["18"] * 2, {})
    assert [result.reward for result in results] == [0.0, 0.0]
    assert results[0].components == {"gsm8k": 0.0}


def test_boxed_comes_before_hashes_in_gsm8k():
    with build_reward(["gsm8k"]) as reward:
        assert numbers_of(reward, [r"\boxed{1} #### 2"] * 2, ["1", "2"]) == [1.0, 0.0]


def test_plain_answers_start_no_grader():
    reward = MathReward(BOXED_MATH)
    responses = [r"\boxed{0.5}", r"\boxed{2}", "none", r"\boxed{x}", "\\boxed{" + "1+" * 999 + "1}"]
    assert numbers_of(reward, responses, ["1/2", "3", "3", "$x$", "1000"]) == [1, 0, 0, 1, 0]
    # Private here and below: only a worker knows whether it was started.
    assert [worker.num_starts for worker in reward.workers.workers] == [0, 0]
    assert "math_verify" not in sys.modules


@pytest.mark.full
def test_the_grader_decides_by_value(boxed_math):
    cases = [
        (r"\frac{1}{2}", "0.5", 1),
        (r"x^2+2x+1", "(x+1)^2", 1),
        (r"\sqrt{8}", r"2\sqrt{2}", 1),
        (r"18 \text{ dollars}", "18", 1),
        (r"\{2, 1\}", r"\boxed{\{1, 2\}}", 1),
        ("(2,1)", "(1,2)", 0),
        (r"\frac{", "3", 0),
        ("0.333", "1/3", 0),
        ("west", "east", 0),
    ]
    responses = [f"\\boxed{{{answer}}}" for answer, _, _ in cases]
    expected = [float(score) for _, _, score in cases]
    assert numbers_of(boxed_math, responses, [gold for _, gold, _ in cases]) == expected


@pytest.mark.full
def test_an_answer_that_hangs_the_grader_is_undecided_and_harms_no_other():
    reward = MathReward(BOXED_MATH, grading_seconds=2.0, num_workers=1)
    try:
        responses = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\frac{1}{2}}"]
        results = results_of(reward, responses, ["3", "0.5"])
    finally:
        reward.close()
    assert results == [None, RewardResult(1.0, {"boxed_math": 1.0})]
    # A fork of the worker was killed, not the worker.
    assert reward.workers.workers[0].num_starts == 1


@pytest.mark.parametrize(
    "rule, label, message",
    [
        (BOXED_MATH, None, "label of sample 1: the row has no label: set --label_key"),
        (BOXED_MATH, " ", "label of sample 1: the label is empty"),
        (BOXED_MATH, "2 + 3\n#### 5", "got a worked solution.*use the reward gsm8k"),
        (GSM8K, "Paris", "label of sample 1: expected a number.*'Paris'"),
    ],
)
def test_unusable_labels_are_errors_that_name_the_sample(rule, label, message):
    with pytest.raises(RewardError, match=message):
        numbers_of(MathReward(rule), [r"\boxed{1}"] * 2, ["1", label])


def steps(response):
    """Lines of Python and tokens of patterns that finding the last box takes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        last_boxed(response)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "piece",
    ["\\boxed{", "\\boxed{{}", "\\boxed", "\\boxed ", "{", "}", "\\", "\\boxed{}}", "\\boxed\\{"],
)
def test_the_work_on_a_response_grows_with_its_length_and_no_faster(piece):
    short, long = (steps(piece * (n // len(piece)) + "}") for n in (4_000, 32_000))
    assert long <= 9 * short
    assert long <= 8 * 32_000


HOSTILE = [
    r"9^{9^{9^{9}}}",
    r"(10^{10})!",
    r"10^{10^{10}}",
    r"\sqrt{2}^{\sqrt{2}^{\sqrt{2}^{99999}}}",
    r"\frac{1}{" * 60 + "2" + "}" * 60,
    "(" * 300 + "1" + ")" * 300,
    r"\sqrt{" * 120 + "2" + "}" * 120,
    "{" * 300 + "1" + "}" * 300,
    "+".join(f"x^{{{i}}}" for i in range(150)),
    "*".join(["(x+y+z)"] * 120),
    r"(x+y+z)^{2000}",
    r"\int_0^1 \int_0^1 e^{x^{y^{x^{y}}}} dx dy",
    r"\lim_{x\to 0} \frac{\sin(\sin(\sin(x^{99})))}{x^{999}}",
    r"\sum_{k=1}^{10^{12}} \frac{1}{k^{k}}",
    r"\prod_{k=1}^{99999} (x+k)",
    r"\binom{10^{9}}{5\cdot 10^{8}}",
    "9" * 999,
    "0." + "1" * 900,
    r"99999999^{9999999}",
    r"\{" + ",".join(map(str, range(250))) + r"\}",
    r"\begin{pmatrix}"
    + r"\\".join("&".join(["x^{9}"] * 8) for _ in range(8))
    + r"\end{pmatrix}^{99}",
    r"\log_{2}{(2^{2^{2^{2^{2^{2}}}}})}",
    r"x=y=z=\frac{x^{99}+y^{99}}{z^{99}-1}=\sin^{99}(x)",
]


@pytest.mark.full
def test_hostile_answers_end_with_the_batch_and_leave_the_worker_alive():
    assert len(HOSTILE) == 23
    deadline = seconds(60)
    reward = MathReward(BOXED_MATH, grading_seconds=0.2, batch_seconds=deadline, num_workers=1)
    try:
        reward.workers.workers[0].start()
        responses = [f"\\boxed{{{answer}}}" for answer in HOSTILE]
        start = time.monotonic()
        results = results_of(reward, responses, [r"\frac{3}{7}+\sqrt{2}"] * 23)
        # 23 times 0.2 s, then 8 times; a restart of the worker for each would take minutes.
        assert time.monotonic() - start < deadline
        assert reward.workers.workers[0].num_starts == 1
    finally:
        reward.close()
    assert {result.reward for result in results if result is not None} <= {0.0}
    assert results.count(None) >= 10


def test_the_deadline_of_a_batch_holds_for_starts_and_all_answers():
    reward = MathReward(BOXED_MATH, batch_seconds=0.2, num_workers=1)
    start = time.monotonic()
    try:
        with pytest.raises(RewardError, match=r"not all answers were compared within 0\.2 s"):
            results_of(reward, [f"\\boxed{{{h}}}" for h in HOSTILE], ["x"] * 23)
    finally:
        reward.close()
    assert time.monotonic() - start < seconds(20)  # 23 starts, or 23 deadlines of 10 s, take longer


def test_answers_cannot_use_up_the_deadline_of_their_batch(monkeypatch):
    reward, spent = MathReward(BOXED_MATH, batch_seconds=100.0, num_workers=1), []

    def undecided(pairs, limit, deadline):
        spent.append((len(pairs), limit))
        return [None] * len(pairs)

    monkeypatch.setattr(reward, "grade", undecided)
    for count in (1, 20, 400):
        results_of(reward, [r"\boxed{x^{y^z}}"] * count, ["x^{z^y}"] * count)
    assert spent == [
        *[(1, 1.0), (1, 10.0)],
        *[(20, 1.0), (8, pytest.approx(25 / 8))],
        *[(400, pytest.approx(25 / 400)), (8, pytest.approx(25 / 8))],
    ]


@pytest.mark.full
def test_what_a_model_writes_can_neither_name_another_gold_answer_nor_end_the_run():
    reward = MathReward(BOXED_MATH, num_workers=1)
    try:
        forged = ["\\boxed{x\0x\0}", '\\boxed{x", "x}', "\\boxed{\ud800}", "\\boxed{\\x\1}"]
        results = results_of(reward, forged, ["y+1"] * 4)
    finally:
        reward.close()
    assert [result.reward for result in results] == [0.0] * 4


@pytest.mark.full
def test_a_number_of_thousands_of_digits_is_compared_as_text():
    huge = "7" * 5_000
    (result,) = results_of(MathReward(BOXED_MATH), [r"\boxed{7x}"], [f"\\boxed{{{huge}}}"])
    assert result.reward == 0.0

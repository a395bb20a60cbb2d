"""Tasks of reasoning-gym as data and as score."""

import inspect
import re

import pytest
from tests.rewards.asking import results_of

from lightrft.config import TrainConfig
from lightrft.datasets import read_rows
from lightrft.datasets.types import DataError
from lightrft.rewards import RewardError, RewardResult, build_reward
from lightrft.rewards.process import WorkerPool
from lightrft.strategy.config import ConfigError
from lightrft.tools.rewards.gym import find_answer
from lightrft.tools.rewards.gym_task import EVALUATED, PARSED, GymScorer, is_harmless

reasoning_gym = pytest.importorskip("reasoning_gym")
GCD = "reasoning_gym:gcd?size=8&test_size=4&seed=3&min_value=2&max_value=20"


def test_rows_are_those_of_the_package_and_splits_share_none():
    train, test = read_rows(GCD), read_rows(GCD, split="test")
    made = reasoning_gym.create_dataset("gcd", size=12, seed=3, min_value=2, max_value=20)
    assert [row.columns["input"] for row in train + test] == [e["question"] for e in made]
    assert [row.columns["label"] for row in train + test] == [e["answer"] for e in made]
    assert {row.columns["task"] for row in train} == {"gcd"}
    # Why the splits are not two seeds: of neighbours, all rows but one are the same.
    neighbour = reasoning_gym.create_dataset("gcd", size=12, seed=4, min_value=2, max_value=20)
    assert neighbour[0]["question"] == made[1]["question"]


def test_options_may_be_lists_and_signs():
    options = "min_terms=2&max_terms=2&allow_negation=false&allow_parentheses=false"
    source = f"reasoning_gym:basic_arithmetic?size=3&operators=%5B%22%2B%22%5D&{options}"
    for row in read_rows(source):
        assert re.search(r"\d+ \+ \d+", str(row.columns["input"]))


@pytest.mark.parametrize(
    "source, split, message",
    [
        ("reasoning_gym:no_such", "train", "refuses it"),
        ("reasoning_gym:gcd?no_option=1", "train", "refuses it.*no_option"),
        ("reasoning_gym:gcd?size", "train", "expected reasoning_gym:NAME"),
        ("reasoning_gym:gcd?size=0", "train", "size must be a whole number"),
        ("reasoning_gym:gcd?seed=null", "train", "seed must be a whole number"),
        ("reasoning_gym:gcd?min_value=9&max_value=3", "train", "refuses it"),
        ("reasoning_gym:gcd", "validation", "expected train or test"),
    ],
)
def test_what_is_wrong_with_a_source_is_named(source, split, message):
    with pytest.raises(DataError, match=message):
        read_rows(source, split=split)


@pytest.mark.full
def test_scores_are_the_scorers_of_the_extracted_answers():
    rows = read_rows(GCD)
    golds = [str(row.columns["label"]) for row in rows]
    responses = [f"I think.\n<answer> {gold} </answer>" for gold in golds]
    entries = {"reasoning_gym": [row.columns["reasoning_gym"] for row in rows]}
    config = TrainConfig(reward_timeout_seconds=60.0)
    with build_reward(["reasoning_gym:gcd"], config=config) as reward:
        blank = [""] * len(rows)
        results = reward.score(blank, responses, golds, entries)
        assert [result.reward for result in results] == [1.0] * 8
        assert results[0].components == {"gcd": 1.0, "scorer_failed": 0.0}
        prose = reward.score(blank, [f"The answer is {gold}" for gold in golds], golds, entries)
        made = reasoning_gym.create_dataset("gcd", size=1)
        for result, row in zip(prose, rows, strict=True):
            answer = f"The answer is {row.columns['label']}"
            entry = row.columns["reasoning_gym"]
            assert result.reward == made.score_answer(answer, entry) < 1.0
        with pytest.raises(RewardError, match="sample 0 is of no row of this task"):
            results_of(reward, ["r"])


@pytest.mark.full
def test_a_task_that_does_not_exist_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="no_such"):
        build_reward(["reasoning_gym:no_such"])


@pytest.mark.parametrize(
    "response, answer",
    [
        ("<answer>1</answer> <answer> 2 </answer> x", "2"),
        ("a\nb \n\n", "b"),
        ("<answer>3", "3"),
        ("", ""),
        ("x" * 30_000, ""),
    ],
)
def test_answers_are_extracted(response, answer):
    assert find_answer(response) == answer


def test_a_scorer_that_raises_hangs_or_ends_costs_its_own_answer_only(monkeypatch):
    def score(answer, entry):
        if answer == "hang":
            while True:
                pass
        if answer == "exit":
            raise SystemExit
        if answer == "nan":
            return float("nan")
        return 1.0 / entry["by"]

    answers = ["1", "hang", "1", "exit", "nan", "text", "1"]
    entries = [{"by": 2}] * 5 + [{}, {"by": 4}]
    monkeypatch.setattr(reasoning_gym, "get_score_answer_fn", lambda name: score)
    assert GymScorer("gcd")((answers, entries, 0.5)) == [
        (0.5, "scored"),
        None,
        (0.5, "scored"),
        None,
        (0.0, "failed"),
        (0.0, "failed"),
        (0.25, "scored"),
    ]


def test_what_a_scorer_cannot_decide_is_undecided(monkeypatch):
    (first, second, *_) = read_rows(GCD)
    entries = {"reasoning_gym": [row.columns["reasoning_gym"] for row in (first, second)]}
    with build_reward(["reasoning_gym:gcd"]) as reward:
        monkeypatch.setattr(WorkerPool, "call", lambda *_, **__: [None, [0.5, "scored"]])
        results = results_of(reward, ["1", "2"], **entries)
    assert results == [None, RewardResult(0.5, {"gcd": 0.5, "scorer_failed": 0.0})]


def test_every_scorer_that_evaluates_answers_is_known():
    found = set()
    for name, (dataset, _) in reasoning_gym.factory.DATASETS.items():
        text = inspect.getsource(dataset)
        if re.search(r"\b(eval|parse_expr|exec|sympify)\(\s*answer", text) or (
            re.search(r"\b(eval|exec)\(", text) and "eval(entry" not in text
        ):
            found.add(name)
    # These evaluate what they made themselves.
    assert found - {"codeio"} == EVALUATED | PARSED


@pytest.mark.parametrize("name", sorted(EVALUATED | PARSED))
def test_no_code_of_an_answer_is_evaluated(name, tmp_path):
    file = tmp_path / "made"
    for code in (
        f"open('{file}', 'w')",
        f"[open('{file}', 'w')]",
        f"['a', open('{file}', 'w')]",
        f"__import__('os').mkdir('{file}')",
        "().__class__",
        "x.__class__",
        "preview(x)",
        "test()",
        f"[[1, 2], open('{file}', 'w')]",
    ):
        assert not is_harmless(name, code), code
    right = {
        "string_insertion": "['A', 'B']",
        "spiral_matrix": "[1, 2, 3]",
        "n_queens": "_ Q\nQ _",
        "binary_matrix": "[[0, 1], [1, 0]]",
    }
    assert is_harmless(name, right.get(name, "2*x**2/3 + sin(x)*exp(-0.5*x) + C"))

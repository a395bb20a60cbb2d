"""Generative reward models: questions in both orders, verdicts, and how they follow positions."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.rewards.asking import results_of

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.datasets.files import read_rows, read_sources
from lightrft.datasets.types import DataError, Prompt
from lightrft.records.answer_order import PAIR_COLUMN, position_metrics
from lightrft.rewards import build_reward
from lightrft.rewards.types import RewardError
from lightrft.run.resume import input_files
from lightrft.tools.model_presets import write_tiny_model
from lightrft.tools.rewards.judge_answers import verdict_letter
from lightrft.tools.rewards.verdicts import ask

PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"both_orders:{path}"


def evaluate(verdicts, num_samples=1):
    """Position metrics of the responses to questions that all stand in both orders.

    Args:
        verdicts: Responses to the two orders of each pair.
        num_samples: Of each prompt; a verdict is then a list.
    """
    labels = ["A", "B"] * len(verdicts)
    prompts = [
        Prompt(place, "", (), label, {PAIR_COLUMN: place // 2})
        for place, label in enumerate(labels)
    ]
    given = [each for pair in verdicts for each in pair]
    flat = [text for each in given for text in (each if num_samples > 1 else [each])]
    with build_reward(["verdict"]) as reward:
        results = reward.score(flat, flat, list(np.repeat(labels, num_samples)), {})
    names = sorted({name for result in results for name in result.components})
    table = SimpleNamespace(
        component_names=tuple(names),
        components=np.array(
            [[result.components.get(name, np.nan) for name in names] for result in results]
        ),
        is_masked=np.zeros(len(flat), bool),
        group_ids=np.repeat(np.arange(len(labels)), num_samples),
    )
    return np.mean([result.reward for result in results]), position_metrics(table, prompts)


def test_a_pair_becomes_a_question_in_both_orders_that_says_where_the_better_answer_is(tmp_path):
    first, second = read_rows(write(tmp_path / "pairs.jsonl", [PAIR]))
    for row, letter, answers in ((first, "A", "45"), (second, "B", "54")):
        question = row.columns["input"]
        assert row.columns["prompt"] == question == ask("2+2?", *answers)
        assert row.columns["completion"] == f"Verdict: {letter}"
        assert row.columns["label"] == letter
        start = question.index("Answer A ")
        assert question.index(f"\n{answers[0]}\n", start) < question.index("Answer B ")
        assert question.index("Answer B ") < question.index(f"\n{answers[1]}\n", start)
    assert first.columns[PAIR_COLUMN] == second.columns[PAIR_COLUMN]


def test_the_pairs_of_several_files_are_not_confused(tmp_path):
    sources = [write(tmp_path / f"{name}.jsonl", [PAIR]) for name in "ab"]
    rows = read_sources(",".join(sources), split="train", seed=0)
    assert len(rows) == 4
    assert len({row.columns[PAIR_COLUMN] for row in rows}) == 2


def test_conversations_are_shown_with_their_roles(tmp_path):
    asked = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
    ]
    row = {
        name: [*asked, {"role": "assistant", "content": text}]
        for name, text in (("chosen", "4"), ("rejected", "5"))
    }
    found, _ = read_rows(write(tmp_path / "pairs.jsonl", [row]))
    assert found.columns["input"] == ask("system: Be brief.\n\nuser: 2+2?", "4", "5")


@pytest.mark.parametrize(
    "row, said",
    [
        ({"prompt": "a", "chosen": "b"}, "expected columns prompt, chosen and rejected"),
        ({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}, "found 'prompt_ids'"),
        ({"chosen": "b", "rejected": "c"}, "the answers need a prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
    ],
)
def test_what_is_no_pair_of_texts_is_refused_with_its_place(tmp_path, row, said):
    with pytest.raises(DataError, match=f"pairs.jsonl:2.*{said}"):
        read_rows(write(tmp_path / "pairs.jsonl", [PAIR, row]))


def test_a_run_knows_the_contents_of_the_file(tmp_path):
    source = write(tmp_path / "pairs.jsonl", [PAIR])
    assert tmp_path / "pairs.jsonl" in input_files(TrainConfig(prompt_data=source))


@pytest.mark.parametrize(
    "response, letter",
    [
        ("Verdict: A", "A"),
        ("A is wrong.\nVerdict: B\n", "B"),
        ("Verdict: C", None),
        ("Verdict: A or B", None),
        ("verdict: A", None),
        ("Verdict: A\nVerdict: B", None),
        ("Verdict: A, I think", None),
        ("", None),
    ],
)
def test_a_verdict_is_the_only_one_and_the_last_line(response, letter):
    assert verdict_letter(response) == letter


@pytest.mark.parametrize(
    "label, problem", [("4", "expected the letter.*got '4'"), (None, "the row")]
)
def test_the_reward_needs_the_letter_of_the_better_answer(label, problem):
    expected = f"label of sample 1: {problem}.*: give the data as both_orders:FILE"
    with build_reward(["verdict"]) as reward, pytest.raises(RewardError, match=expected):
        results_of(reward, ["Verdict: A"] * 2, ["A", label])


@pytest.mark.parametrize(
    "verdicts, accuracy, expected",
    [
        ("AA AA", 0.5, {"consistency": 0.0}),
        ("AB AB", 1.0, {"consistency": 1.0, "consistent_accuracy": 1.0}),
        ("BA BA", 0.0, {"consistency": 1.0, "consistent_accuracy": 0.0}),
        ("AB BA AA BB", 0.5, {"consistency": 0.5, "consistent_accuracy": 0.5}),
        # No verdict is no answer named twice.
        ("CC AB", 0.5, {"consistency": 0.5, "consistent_accuracy": 1.0}),
        ("AC CB", 0.5, {"consistency": 0.0}),
    ],
)
def test_consistency_of_worked_cases(verdicts, accuracy, expected):
    pairs = [tuple(f"Verdict: {letter}" for letter in pair) for pair in verdicts.split()]
    assert evaluate(pairs) == (accuracy, expected)


def test_samples_of_both_orders_are_compared_one_by_one():
    first = [f"Verdict: {letter}" for letter in "AABB"]
    second = [f"Verdict: {letter}" for letter in "BABA"]
    accuracy, found = evaluate([(first, second)], num_samples=4)
    assert accuracy == 0.5
    assert found == {"consistency": 0.5, "consistent_accuracy": 0.5}


def test_prompts_that_are_no_pairs_have_no_consistency(tmp_path):
    table = SimpleNamespace(component_names=("correct",))
    assert position_metrics(table, [Prompt(0, "", ())]) == {}


def pairs(numbers):
    return [
        {"prompt": f"Task {n}", "chosen": f"good {n}", "rejected": f"evil {n}"} for n in numbers
    ]


def flags(options):
    """The options as arguments."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@pytest.mark.full
def test_a_judge_learns_its_task_and_the_run_shows_that_it_ignores_positions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_model("tiny", "tiny-qwen3")
    taught, held_out = (
        write(tmp_path / f"{name}.jsonl", pairs(numbers))
        for name, numbers in (("taught", range(10, 42)), ("held_out", range(60, 68)))
    )
    train_options = {"train_batch_size": 16, "micro_train_batch_size": 16, "prompt_data": taught}
    asked = {
        "eval_data": held_out,
        "reward_fn": "verdict",
        "generate_max_len": 12,
        "prompt_max_len": 400,
        "engine_type": "hf",
    }
    sft = {"pretrain": "tiny", "max_epochs": 7, "actor_learning_rate": 5e-3, "output_dir": "sft"}
    grpo = {
        "pretrain": "sft/model",
        "max_steps": 1,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "eval_steps": 1,
        "output_dir": "grpo",
    }
    assert main(["sft", "--fsdp", "--no_bf16", *flags(train_options | sft)]) == 0
    assert main(["train", "--fsdp", "--no_bf16", *flags(train_options | asked | grpo)]) == 0
    steps = [json.loads(line) for line in Path("grpo/metrics.jsonl").read_text().splitlines()]
    assert steps[0]["eval/reward"] >= 0.9
    assert steps[0]["eval/consistency"] >= 0.8
    assert steps[0]["eval/consistent_accuracy"] >= 0.9
    assert steps[-1]["reward/readable"] >= 0.9
    assert main(["eval", "tiny", "--no_bf16", *flags(asked | {"num_samples": 2})]) == 0
    metrics = json.loads(Path("lightrft_eval/eval.json").read_text())["metrics"]
    assert metrics["greedy/consistency"] == metrics["sampled/consistency"] == 0.0

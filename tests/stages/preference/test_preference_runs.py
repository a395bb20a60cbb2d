"""Whole runs of learning from preferences: what they learn, name and refuse, to the bit."""

from __future__ import annotations

from functools import partial

import pytest
from tests import runs
from tests.ranks import run_multiprocess
from tests.runs import continued, in_ranks, steps, tiny_models, write

from lightrft.config import ConfigError, TrainConfig
from lightrft.run.assembly import run_training
from lightrft.trainer import PreferenceTrainer

options = partial(runs.row_options, actor_learning_rate=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_models(tmp_path_factory.mktemp("prefer"), "model") / "model")


def write_pairs(folder, name, *, start=0, swapped=False):
    """Eight pairs that a digit tells apart."""
    names = ("rejected", "chosen") if swapped else ("chosen", "rejected")
    rows = (
        {"prompt": f"name {n}: ", names[0]: f"yes {n * 7 % 10}", names[1]: f"no {n * 3 % 10}"}
        for n in range(start, start + 8)
    )
    return write(folder / f"{name}.jsonl", rows)


def test_pairs_are_told_apart_and_so_are_held_out_ones(tmp_path, model, capsys):
    held_out = write_pairs(tmp_path, "held_out", start=8)
    rows = write_pairs(tmp_path, "rows")
    config = TrainConfig(
        **options(model, rows, tmp_path / "run", eval_data=held_out, best_metric="eval/accuracy")
    )
    summary = PreferenceTrainer(config).train()
    assert summary.verdict.startswith("trained: 6 of 6")
    start, end = summary.first_eval, summary.last_eval
    # The margin is 0 before the first step, and no pair is decided.
    assert start["eval/margin"] == pytest.approx(0.0, abs=1e-5)
    assert start["eval/loss"] == pytest.approx(0.6931471806, abs=1e-5)
    assert end["eval/accuracy"] == 1.0
    assert end["eval/margin"] > 1
    assert summary.last_metrics["accuracy"] == 1.0
    assert (tmp_path / "run/checkpoints/best").is_dir()
    said = capsys.readouterr().out
    assert "swapped" not in said
    assert "held-out pairs are trained on" not in said


def test_a_swap_of_chosen_and_rejected_is_named(tmp_path, model, capsys):
    rows = write_pairs(tmp_path, "rows")
    held_out = write_pairs(tmp_path, "held_out", start=8, swapped=True)
    config = TrainConfig(**options(model, rows, tmp_path / "run", eval_data=held_out))
    summary = PreferenceTrainer(config).train()
    assert summary.last_eval["eval/accuracy"] == 0.0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "swapped" in text]
    assert "accuracy is 1.00 on trained pairs and 0.00 on 8 held-out ones" in line


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora_rank": 4, "packing_samples": True},
        {"preference_loss": ("kto", "aot"), "preference_weights": (1.0, 0.5)},
    ],
)
def test_an_interrupted_run_continues_to_the_bit(tmp_path, model, changes):
    rows = write_pairs(tmp_path, "rows")
    settings = partial(options, model, rows, save_steps=2, **changes)
    # In the middle of the second pass over the data.
    summary = continued(PreferenceTrainer, tmp_path, settings, 4)
    assert (summary.num_resumed_steps, summary.num_steps) == (2, 6)
    before, after = (steps(tmp_path / "whole")[place]["loss"] for place in (0, -1))
    assert after < before


def compare_with_one_rank(tmp_path, model, interrupted_at, **backend):
    """Trains on one rank and on two of a backend; their steps agree."""
    rows = write_pairs(tmp_path, "rows")
    changes = {"micro_train_batch_size": 1, "save_steps": 2, "eval_data": rows}
    changes |= {"actor_learning_rate": 1e-4}
    one = TrainConfig(**options(model, rows, tmp_path / "one", fsdp=True, **changes))
    PreferenceTrainer(one).train()
    settings = options(model, rows, tmp_path / "two", **changes, **backend)
    args = ("PreferenceTrainer", [settings], interrupted_at)
    ranks = run_multiprocess(in_ranks, 2, timeout_seconds=300, args=args)
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert len(one) == len(two) == 7  # the evaluation before the first step, and six steps
    for expected, found in zip(one[1:], two[1:], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
    assert two[-1]["eval/margin"] == pytest.approx(one[-1]["eval/margin"], rel=1e-2)
    return [summary["num_resumed_steps"] for (summary,) in ranks]


@pytest.mark.full
@pytest.mark.multiprocess
def test_two_ranks_train_on_the_rows_of_one_and_continue(tmp_path, model):
    assert compare_with_one_rank(tmp_path, model, 4, fsdp=True) == [2, 2]


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.deepspeed
def test_two_ranks_of_zero_train_on_the_rows_of_one(tmp_path, model):
    assert compare_with_one_rank(tmp_path, model, None, fsdp=False, zero_stage=2) == [0, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init_kl_coef": 0.1}, "init_kl_coef is no option of lightrft prefer"),
        ({"train_on": "all"}, "train_on is no option of lightrft prefer"),
        ({"train_batch_size": 16}, "has 8 usable rows, less than one step takes"),
        ({"preference_args": {"gamma": 1.0}}, "preference_args: gamma does nothing for prefer"),
        ({"preference_args": {"beta": "x"}}, "preference_loss dpo: beta: got 'x'"),
        ({"preference_weights": (1.0, 2.0)}, "preference_weights: got 2 for 1 losses"),
        (
            {"preference_loss": ("robust",), "preference_args": {"label_smoothing": 0.5}},
            r"preference_loss robust fails on an example: label_smoothing must be in \[0, 0.5\)",
        ),
        (
            {"preference_loss": ("kto",), "train_batch_size": 1, "micro_train_batch_size": 1},
            "it needs train_batch_size >= 2, got 1",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, model, changes, said):
    rows = write_pairs(tmp_path, "rows")
    with pytest.raises(ConfigError, match=said):
        PreferenceTrainer(TrainConfig(**options(model, rows, tmp_path / "run", **changes))).train()
    assert not (tmp_path / "run").exists()


def test_other_stages_refuse_options_of_preferences(tmp_path, model):
    rows = write_pairs(tmp_path, "rows")
    given = options(model, rows, tmp_path / "run", preference_loss=("ipo",))
    with pytest.raises(ConfigError, match="preference_loss is an option of lightrft prefer"):
        run_training(TrainConfig(**given, reward_fn=("gsm8k",)))
    with pytest.raises(ConfigError, match="preference_loss is no option of lightrft sft"):
        run_training(TrainConfig(**given), stage="sft")


def test_an_own_loss_is_taken_and_a_wrong_one_is_named(tmp_path, model):
    rows = write_pairs(tmp_path, "rows")
    (tmp_path / "own.py").write_text(
        "def mine(sums, *, scale: float = 1.0):\n    return -scale * sums.gaps\n"
        "def wrong(sums):\n    return sums.gaps.sum()\n"
    )
    own = {"preference_loss": (f"{tmp_path}/own.py:mine",), "preference_args": {"scale": 0.5}}
    config = TrainConfig(**options(model, rows, tmp_path / "run", max_steps=2, **own))
    summary = PreferenceTrainer(config).train()
    assert summary.last_metrics["loss"] == pytest.approx(-0.5 * summary.last_metrics["margin"])
    own = {"preference_loss": (f"{tmp_path}/own.py:wrong",)}
    with pytest.raises(ConfigError, match="expected 3 finite numbers with a gradient"):
        PreferenceTrainer(TrainConfig(**options(model, rows, tmp_path / "new", **own))).train()


def test_the_report_shows_the_run(tmp_path, model, capsys):
    from lightrft.tools.report.page import render_report

    rows = write_pairs(tmp_path, "rows")
    config = TrainConfig(**options(model, rows, tmp_path / "run", max_steps=2, eval_data=rows))
    assert PreferenceTrainer(config).train().num_steps == 2
    assert "the prompts of 8 of 8 held-out pairs are trained on, too" in capsys.readouterr().out
    page = render_report(tmp_path / "run")
    assert "chosen_reward" in page
    assert "margin" in page

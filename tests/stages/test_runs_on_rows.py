"""What every stage on given rows promises of its runs, as tables over stages."""

import json
import math
from functools import partial

import pytest
from tests.ranks import run_multiprocess
from tests.runs import continued, in_ranks, steps, train
from tests.stages.row_stages import TRAINERS, options, run, write_rows

from lightrft.config import ConfigError
from lightrft.tools.report.page import render_report

ADAPTERS = {"lora_rank": 4, "packing_samples": True}
QUANTIZED = {"lora_rank": 4, "quantize": "nf4", "fsdp": True}
SAMPLING = {"generate_max_len": 4, "prompt_max_len": 32}
# Ways to train, by the stage and what is different.
CONTINUED = {
    **{stage: {} for stage in TRAINERS},
    **{f"{stage}, adapters, packed": ADAPTERS for stage in ("sft", "prefer", "reward")},
    **{f"{stage}, 4 bits": QUANTIZED for stage in TRAINERS},
    "prefer, two losses": {"preference_loss": ("kto", "aot"), "preference_weights": (1.0, 0.5)},
    "distill, own samples": {**SAMPLING, "offpolicy_fraction": 0.4, "teacher_form": "reverse"},
}


@pytest.mark.parametrize("way", CONTINUED)
def test_an_interrupted_run_continues_to_the_bit(tmp_path, models, way):
    stage, rows = way.split(",")[0], write_rows(tmp_path)
    changes = {"save_steps": 2, "eval_data": rows, **CONTINUED[way]}
    # In the middle of the second pass over the data.
    summary = continued(
        TRAINERS[stage], tmp_path, partial(options, stage, models, rows, **changes), 4
    )
    assert (summary.num_resumed_steps, summary.num_steps) == (2, 6)
    if "samples" not in way:
        assert summary.last_eval["eval/loss"] < summary.first_eval["eval/loss"]
    configs = [(tmp_path / name / "model/config.json").read_text() for name in ("whole", "parts")]
    assert configs[0] == configs[1]
    assert stage != "reward" or math.isfinite(json.loads(configs[0])["score_std"])


@pytest.mark.full
@pytest.mark.parametrize(
    "stage, backend",
    [
        *((stage, {"fsdp": True}) for stage in TRAINERS),
        *(
            pytest.param(stage, {"zero_stage": 2}, marks=pytest.mark.deepspeed)
            for stage in ("sft", "prefer")
        ),
    ],
)
def test_two_ranks_train_on_the_rows_of_one_and_continue(tmp_path, models, stage, backend):
    rows = write_rows(tmp_path)
    changes = {"micro_train_batch_size": 1, "save_steps": 2, "eval_data": rows}
    changes["actor_learning_rate"] = 1e-4
    run(stage, models, rows, tmp_path / "one", fsdp=True, **changes)
    settings = options(stage, models, rows, tmp_path / "two", **changes, **backend)
    args = (TRAINERS[stage].__name__, [settings], 4)
    for (summary,) in run_multiprocess(in_ranks, 2, timeout_seconds=300, args=args):
        assert summary["num_resumed_steps"] == 2
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert len(one) == len(two) == 7  # the evaluation before the first step, and six steps
    for expected, metrics in zip(one[1:], two[1:], strict=True):
        # Pairs are not counted in tokens.
        assert metrics.get("num_tokens") == expected.get("num_tokens")
        small = 1e-5 if stage == "reward" else 0
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=small)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
    for name, within in {"eval/loss": 1e-3, "eval/margin": 1e-2}.items():
        if name in one[-1]:
            assert two[-1][name] == pytest.approx(one[-1][name], rel=within)
    if stage == "reward":
        means = [
            json.loads((tmp_path / name / "model/config.json").read_text())["score_mean"]
            for name in ("one", "two")
        ]
        assert means[1] == pytest.approx(means[0], abs=1e-3)


# What held-out rows are called, and words of the report.
SHOWN = {
    "sft": ("rows", "perplexity trained_share Loss"),
    "prefer": ("pairs", "chosen_reward margin"),
    "reward": ("judgements", "score_margin"),
    "distill": ("rows", "trained_share Loss"),
}


@pytest.mark.parametrize("stage", TRAINERS)
def test_the_report_shows_a_run_and_the_console_held_out_rows_that_are_trained_on(
    tmp_path, models, capsys, stage
):
    rows = write_rows(tmp_path)
    summary = run(stage, models, rows, tmp_path / "run", max_steps=2, eval_data=rows)
    assert summary.num_steps == 2
    noun, words = SHOWN[stage]
    said = capsys.readouterr().out
    assert f"the prompts of 8 of 8 held-out {noun} are trained on, too" in said
    page = render_report(tmp_path / "run")
    assert all(word in page for word in words.split())


@pytest.mark.parametrize(
    "stage, said",
    [
        ("prefer", "accuracy is 1.00 on trained pairs and 0.00 on 16 held-out ones"),
        ("reward", "of 16 held-out judgements are met, less than guessing would: chosen and"),
    ],
)
def test_a_swap_of_chosen_and_rejected_is_named(tmp_path, models, capsys, stage, said):
    rows = write_rows(tmp_path)
    held_out = write_rows(tmp_path, "held_out", start=8, count=16, swapped=True)
    summary = run(stage, models, rows, tmp_path / "run", max_epochs=4, eval_data=held_out)
    assert summary.last_eval["eval/accuracy"] < 0.1
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "swapped" in text]
    assert said in line


@pytest.mark.parametrize(
    "stage, metric",
    [("sft", "eval/loss"), ("prefer", "eval/loss"), ("reward", "eval/calibration_error")],
)
def test_a_model_that_gets_worse_is_not_the_best(tmp_path, models, capsys, stage, metric):
    rows, held_out = write_rows(tmp_path), write_rows(tmp_path, "held_out", swapped=True)
    changes = {"eval_data": held_out, "eval_steps": 1, "max_steps": 2, "best_metric": metric}
    changes |= {"actor_learning_rate": 0.03, "lr_warmup_ratio": 0.0}
    run(stage, models, rows, tmp_path / "run", **changes)
    said = [x for x in capsys.readouterr().out.splitlines() if f"best {metric} so far" in x]
    values = [step[metric] for step in steps(tmp_path / "run") if metric in step]
    assert max(values) > min(values)
    assert f"so far: {min(values):.6g}, the smallest, after step" in said[-1]


OF_OTHERS = {
    "sft": {"preference_loss": ("ipo",)},
    "prefer": {"train_on": "all"},
    "reward": {"train_on": "all"},
    "distill": {"teacher_coef": 0.5},
}


@pytest.mark.parametrize("stage", TRAINERS)
def test_options_of_other_stages_are_refused(tmp_path, models, stage):
    rows = write_rows(tmp_path)
    for changes in ({"init_kl_coef": 0.1}, OF_OTHERS[stage]):
        (name,) = changes
        with pytest.raises(
            ConfigError, match=f"{name} is an option of .*, not of lightrft {stage}"
        ):
            run(stage, models, rows, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "stage, changes, said",
    [
        ("sft", {"train_on": "all"}, "train_on is an option of lightrft sft"),
        ("prefer", {"preference_loss": ("ipo",)}, "preference_loss is an option of lightrft pref"),
        ("distill", {}, "teacher_form forward is of the rows of lightrft distill"),
    ],
)
def test_reinforcement_refuses_options_of_rows(tmp_path, models, stage, changes, said):
    settings = options(stage, models, write_rows(tmp_path), tmp_path / "run", **changes)
    sizes = {"n_samples_per_prompt": 8, "rollout_batch_size": 8, "train_batch_size": 8}
    with pytest.raises(ConfigError, match=said):
        train({**settings, **sizes, "reward_fn": ("gsm8k",)})

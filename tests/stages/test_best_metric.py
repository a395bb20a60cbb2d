"""The best model is that of the better value: small losses and errors, large rewards."""

from __future__ import annotations

import json

import pytest
from tests.runs import row_options, tiny_models, write

from lightrft.config import ConfigError, TrainConfig
from lightrft.reporting.metric_table import larger_is_better
from lightrft.run.resume import plan_run
from lightrft.trainer import PreferenceTrainer, RewardTrainer, SFTTrainer

PAIRS = [{"prompt": f"{n}: ", "chosen": "yes", "rejected": "no"} for n in range(4)]
OTHERS = [{"prompt": f"{n}: ", "chosen": "no", "rejected": "yes"} for n in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_models(tmp_path_factory.mktemp("best"), "model") / "model")


@pytest.mark.parametrize(
    ("trainer", "metric", "rows", "held_out"),
    [
        (
            SFTTrainer,
            "eval/loss",
            [{"prompt": p["prompt"], "completion": p["chosen"]} for p in PAIRS],
            [{"prompt": p["prompt"], "completion": p["chosen"]} for p in OTHERS],
        ),
        (PreferenceTrainer, "eval/loss", PAIRS, OTHERS),
        (RewardTrainer, "eval/calibration_error", PAIRS, OTHERS),
    ],
)
def test_a_model_that_gets_worse_is_not_the_best(
    tmp_path, model, capsys, trainer, metric, rows, held_out
) -> None:
    changes = {
        "eval_data": write(tmp_path / "held_out.jsonl", held_out),
        "eval_steps": 1,
        "max_steps": 2,
        "best_metric": metric,
        "actor_learning_rate": 0.03,
        "lr_warmup_ratio": 0.0,
    }
    run = row_options(model, write(tmp_path / "rows.jsonl", rows), tmp_path / "run", **changes)
    trainer(TrainConfig(**run)).train()
    said = [
        line for line in capsys.readouterr().out.splitlines() if f"best {metric} so far" in line
    ]
    values = [
        json.loads(line)[metric]
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        if metric in json.loads(line)
    ]
    assert max(values) > min(values)
    assert f"so far: {min(values):.6g}, the smallest, after step" in said[-1]


@pytest.mark.parametrize("metric", ["eval/response_length", "eval/num_rows", "eval/seconds"])
def test_what_is_neither_better_nor_worse_is_refused_before_the_run(tmp_path, metric) -> None:
    with pytest.raises(ConfigError, match=f"best_metric: neither.* of {metric} are better; give"):
        plan_run(TrainConfig(output_dir=str(tmp_path), best_metric=metric))


def test_rewards_their_parts_and_metrics_of_users_are_the_better_the_larger() -> None:
    assert all(map(larger_is_better, ("eval/reward", "eval/format", "eval/accuracy", "own/score")))
    small = ("eval/loss", "eval/perplexity", "eval/truncated_share", "eval/masked_share")
    assert not any(map(larger_is_better, small))

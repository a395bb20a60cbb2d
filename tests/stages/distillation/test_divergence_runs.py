"""Whole runs of distillation on rows, with divergences over the whole vocabulary."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.ranks import run_multiprocess

from lightrft.config import ConfigError, TrainConfig
from lightrft.run.assembly import run_training
from lightrft.stages.policy.parity import ParityError
from lightrft.stages.policy.teacher import require_zero
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.distributed.process_end import RunStoppedError
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer import DistillationTrainer

FORMS = ("reverse", "forward", "jsd")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("divergence")
    for seed, name in enumerate(("student", "teacher"), start=1):
        write_tiny_model(folder / name, "tiny-qwen3", seed=seed)
    return folder


@pytest.fixture
def rows(tmp_path):
    """Lengths differ, and so do the numbers of trained tokens."""
    path = tmp_path / "rows.jsonl"
    texts = [{"prompt": f"name {i}: ", "completion": "word " * (1 + i % 4 * 5)} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return str(path)


def options(models, rows, folder, **changes):
    return {
        "pretrain": str(models / "student"),
        "teacher": str(models / "teacher"),
        "teacher_form": "forward",
        "prompt_data": rows,
        "output_dir": str(folder),
        "train_batch_size": 8,
        "micro_train_batch_size": 4,
        "actor_learning_rate": 3e-3,
        "num_threads": 1,
        "fsdp": True,
        **changes,
    }


def steps(folder):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["step"] > 0]


@pytest.mark.parametrize("form", FORMS)
def test_the_student_moves_to_the_teacher(tmp_path, models, rows, form):
    changes = {"teacher_form": form, "max_epochs": 40, "lr_scheduler": "constant"}
    config = TrainConfig(**options(models, rows, tmp_path / "run", **changes))
    summary = DistillationTrainer(config).train()
    losses = [step["loss"] for step in steps(tmp_path / "run")]
    assert summary.verdict.startswith("learned: 40 of 40")
    assert losses[-1] < 0.2 * losses[0]
    assert "perplexity" not in summary.last_metrics


@pytest.mark.parametrize("form", FORMS)
def test_a_teacher_equal_to_the_student_gives_0(tmp_path, models, rows, form):
    same = {"teacher": str(models / "student"), "teacher_form": form, "max_steps": 1}
    config = TrainConfig(**options(models, rows, tmp_path / "run", **same))
    metrics = DistillationTrainer(config).train().last_metrics
    assert abs(metrics["loss"]) < 1e-6
    assert metrics["grad_norm"] < 1e-4
    assert "teacher = student gives 0" in (tmp_path / "run/logs/rank_0.log").read_text()


def test_a_model_that_differs_from_itself_is_named(models, rows, tmp_path):
    config = TrainConfig(**options(models, rows, tmp_path, teacher=str(models / "student")))
    with get_fake_strategy(config) as strategy:
        require_zero(1e-6, config, strategy)
        for mean in (1e-2, math.nan):
            with pytest.raises(ParityError, match="student and teacher are one model"):
                require_zero(mean, config, strategy)


def test_an_interrupted_run_continues_to_the_bit(tmp_path, models, rows):
    settings = {"save_steps": 1, "max_epochs": 3}
    whole, parts = (
        TrainConfig(**options(models, rows, tmp_path / name, **settings))
        for name in ("whole", "parts")
    )
    DistillationTrainer(whole).train()
    metrics = tmp_path / "parts/metrics.jsonl"
    with pytest.raises(RunStoppedError):
        DistillationTrainer(parts).train(
            stop_request=lambda: metrics.is_file() and bool(steps(metrics.parent))
        )
    assert DistillationTrainer(parts).train().num_resumed_steps in (1, 2)
    weights = [
        (tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "parts")
    ]
    assert weights[0] == weights[1]


def in_ranks(rank, world_size, settings):
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    return DistillationTrainer(TrainConfig(**settings)).train().last_metrics


@pytest.mark.multiprocess
def test_a_step_is_equal_packed_and_padded_on_one_rank_and_on_two(tmp_path, models, rows):
    base, found = {"max_steps": 1, "micro_train_batch_size": 2}, []
    for name, changes in (
        ("padded", {}),
        ("whole", {"micro_train_batch_size": 8}),
        ("packed", {"packing_samples": True}),
    ):
        config = TrainConfig(**options(models, rows, tmp_path / name, **{**base, **changes}))
        found.append(DistillationTrainer(config).train().last_metrics)
    settings = options(models, rows, tmp_path / "two", **base)
    found += run_multiprocess(in_ranks, 2, timeout_seconds=300, args=(settings,))
    settings = options(models, rows, tmp_path / "shared", sp_size=2, packing_samples=True, **base)
    found += run_multiprocess(in_ranks, 2, timeout_seconds=300, args=(settings,))
    for name in ("loss", "grad_norm"):
        expected = pytest.approx(found[0][name], rel=1e-4)
        assert [metrics[name] for metrics in found] == [expected] * len(found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init_kl_coef": 0.1}, "init_kl_coef is no option of lightrft distill"),
        ({"teacher_coef": 0.5}, "teacher_coef is no option of lightrft distill"),
        ({"sft_loss": "dft"}, "sft_loss: not of distillation on rows"),
        ({"fused_linear_logprob": False}, "fused_linear_logprob: not of distillation on rows"),
        ({"audit_every": 1}, "audit_every: not of distillation on rows"),
        ({"teacher": None}, "--teacher is missing"),
        ({"teacher_beta": 1.0}, "teacher_beta: got 1.0, expected <= 0.99"),
        ({"train_batch_size": 16}, "has 8 usable rows, less than one step takes"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, models, rows, changes, said):
    with pytest.raises(ConfigError, match=said):
        DistillationTrainer(
            TrainConfig(**options(models, rows, tmp_path / "run", **changes))
        ).train()


def test_reinforcement_refuses_forms_of_rows(tmp_path, models, rows):
    changes = {"n_samples_per_prompt": 8, "rollout_batch_size": 8, "reward_fn": ("gsm8k",)}
    config = TrainConfig(**options(models, rows, tmp_path / "run", **changes))
    with pytest.raises(
        ConfigError, match="teacher_form forward is of the rows of lightrft distill"
    ):
        run_training(config)

"""Whole runs of distillation on rows, with divergences over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
from tests.runs import steps, tiny_models, write

from lightrft.config import ConfigError, TrainConfig
from lightrft.run.assembly import run_training
from lightrft.stages.policy.parity import ParityError
from lightrft.stages.policy.teacher import require_zero
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.distributed.process_end import RunStoppedError
from lightrft.trainer import DistillationTrainer

FORMS = ("reverse", "forward", "jsd")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tiny_models(tmp_path_factory.mktemp("divergence"), "student", "teacher")


@pytest.fixture
def rows(tmp_path):
    """Lengths differ, and so do the numbers of trained tokens."""
    texts = [{"prompt": f"name {i}: ", "completion": "word " * (1 + i % 4 * 5)} for i in range(8)]
    return write(tmp_path / "rows.jsonl", texts)


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


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_the_student_moves_to_the_teacher(tmp_path, models, rows, form):
    changes = {"teacher_form": form, "max_epochs": 40, "lr_scheduler": "constant"}
    config = TrainConfig(**options(models, rows, tmp_path / "run", **changes))
    summary = DistillationTrainer(config).train()
    losses = [step["loss"] for step in steps(tmp_path / "run") if step["step"] > 0]
    assert summary.verdict.startswith("trained: 40 of 40")
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
            stop_request=lambda: (
                metrics.is_file() and any(s["step"] > 0 for s in steps(metrics.parent))
            )
        )
    assert DistillationTrainer(parts).train().num_resumed_steps in (1, 2)
    weights = [
        (tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "parts")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init_kl_coef": 0.1}, "init_kl_coef is no option of lightrft distill"),
        ({"teacher_coef": 0.5}, "teacher_coef is no option of lightrft distill"),
        ({"sft_loss": "dft"}, "sft_loss: not of distillation on rows"),
        ({"fused_linear_logprob": False}, "fused_linear_logprob: not of distillation on rows"),
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

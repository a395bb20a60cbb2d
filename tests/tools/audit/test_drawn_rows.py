"""The rows that a step trains are those that seed, pass and step draw from the data."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from tests.ranks import run_multiprocess
from tests.runs import interrupted, tiny_models

from lightrft.config import TrainConfig
from lightrft.stages.rows import row_stage
from lightrft.tools.audit.report import audit_step, verdict
from lightrft.trainer import DistillationTrainer, PreferenceTrainer, RewardTrainer, SFTTrainer

pytestmark = pytest.mark.shard("audit")

STAGES = {
    "sft": SFTTrainer,
    "prefer": PreferenceTrainer,
    "reward": RewardTrainer,
    "distill": DistillationTrainer,
}
COMPARED = "rows of the data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and nine rows: two steps of four a pass, one row left out."""
    path = tiny_models(tmp_path_factory.mktemp("drawn"), "model", "teacher")
    row = {"chosen": "yes", "rejected": "no", "completion": "yes"}
    pairs = ("prompt", "chosen", "rejected")
    for name, keys in (("rows", ("prompt", "completion")), ("pairs", pairs)):
        rows = [{"prompt": f"name {n}: "} | row for n in range(9)]
        lines = (json.dumps({key: each[key] for key in keys}) for each in rows)
        (path / f"{name}.jsonl").write_text("\n".join(lines))
    return path


def settings(folder, stage, run, **changes):
    data = "pairs" if stage in ("prefer", "reward") else "rows"
    forward = {"teacher": str(folder / "teacher"), "teacher_form": "forward"}
    return {
        "pretrain": str(folder / "model"),
        "prompt_data": str(folder / f"{data}.jsonl"),
        "output_dir": str(run),
        "train_batch_size": 4,
        "micro_train_batch_size": 2,
        "max_epochs": 2,
        "max_steps": 3,
        "audit_every": 1,
        "save_steps": 1,
        "num_threads": 1,
        "fsdp": True,
        **(forward if stage == "distill" else {}),
        **changes,
    }


def compared(report):
    return next(row for row in report.rows if row.quantity == COMPARED)


@pytest.mark.cover(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_pass_after_a_resume_raises_no_alarm(folder, tmp_path, stage) -> None:
    trainer = STAGES[stage]
    config = TrainConfig(**settings(folder, stage, tmp_path))
    interrupted(trainer, config, 3)
    trainer(config).train()
    report = audit_step(tmp_path, 3)
    assert report.first_difference is None, verdict(report)
    assert compared(report).verdict == "equal"


def once_more(original):
    """A row twice, and another one never."""

    def places(step, strategy):
        drawn = original(step, strategy)
        return [drawn[0], *drawn[:-1]]

    return places


def of_another_pass(original):
    """The rows of the next step, drawn before this one's."""

    def places(step, strategy):
        step.data.next_batch()
        return original(step, strategy)

    return places


@pytest.mark.parametrize(
    ("stage", "plant"), [*((name, once_more) for name in STAGES), ("sft", of_another_pass)]
)
def test_rows_that_are_not_drawn_are_found(folder, tmp_path, monkeypatch, stage, plant) -> None:
    monkeypatch.setattr(row_stage, "drawn_places", plant(row_stage.drawn_places))
    STAGES[stage](TrainConfig(**settings(folder, stage, tmp_path, max_steps=1))).train()
    report = audit_step(tmp_path, 1)
    assert report.first_difference is not None, verdict(report)
    assert report.first_difference.quantity == COMPARED


@pytest.mark.full
def test_a_run_that_went_on_with_other_options_is_not_asked(folder, tmp_path) -> None:
    config = TrainConfig(**settings(folder, "sft", tmp_path, max_steps=1, allow_changes=True))
    SFTTrainer(config).train()
    assert compared(audit_step(tmp_path, 1)).verdict == "not audited"


def in_ranks(rank, world_size, options):
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    SFTTrainer(TrainConfig(**options)).train()


@pytest.mark.multiprocess
def test_two_ranks_raise_no_alarm(folder, tmp_path) -> None:
    options = settings(folder, "sft", tmp_path, micro_train_batch_size=1)
    run_multiprocess(in_ranks, 2, timeout_seconds=300, args=(options,))
    report = audit_step(tmp_path, 3)
    assert report.first_difference is None, verdict(report)
    assert compared(report).verdict == "equal"

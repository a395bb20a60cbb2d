"""The rows that a step trains are those that seed, pass and step draw from the data."""

from __future__ import annotations

import pytest
from tests.faults import calls
from tests.runs import interrupted, row_options, tiny_models, train, train_on_ranks, write

from lightrft.config import TrainConfig
from lightrft.stages.preference import preference_stage
from lightrft.stages.reward import reward_stage
from lightrft.stages.supervised import supervised_stage
from lightrft.tools.audit.report import audit_step, verdict
from lightrft.trainer import DistillationTrainer, PreferenceTrainer, RewardTrainer, SFTTrainer

pytestmark = pytest.mark.shard("audit")

STAGES = {
    "sft": (SFTTrainer, supervised_stage),
    "prefer": (PreferenceTrainer, preference_stage),
    "reward": (RewardTrainer, reward_stage),
    "divergence": (DistillationTrainer, supervised_stage),
}
COMPARED = "rows of the data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and nine rows: two steps of four a pass, one row left out."""
    path = tiny_models(tmp_path_factory.mktemp("drawn"), "model", "teacher")
    for name, row in (
        ("rows", {"completion": "yes"}),
        ("pairs", {"chosen": "yes", "rejected": "no"}),
    ):
        write(path / f"{name}.jsonl", [{"prompt": f"name {n}: "} | row for n in range(9)])
    return path


def settings(folder, stage, run, **changes):
    data = "pairs" if stage in ("prefer", "reward") else "rows"
    forward = {"teacher": str(folder / "teacher"), "teacher_form": "forward"}
    return row_options(folder / "model", folder / f"{data}.jsonl", run, max_steps=3) | {
        "audit_every": 1,
        "save_steps": 1,
        "fsdp": True,
        **(forward if stage == "divergence" else {}),
        **changes,
    }


def compared(report):
    return next(row for row in report.rows if row.quantity == COMPARED)


def assert_no_alarm(run):
    report = audit_step(run, 3)
    assert report.first_difference is None, verdict(report)
    assert compared(report).verdict == "equal"


@pytest.mark.cover(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_pass_after_a_resume_raises_no_alarm(folder, tmp_path, stage) -> None:
    trainer, _ = STAGES[stage]
    config = TrainConfig(**settings(folder, stage, tmp_path))
    interrupted(trainer, config, 3)
    trainer(config).train()
    assert_no_alarm(tmp_path)


def once_more(original, step, strategy):
    """Draw a row twice, and another one never."""
    drawn = original(step, strategy)
    return [drawn[0], *drawn[:-1]]


def of_another_pass(original, step, strategy):
    """Draw the rows of the next step before this one's."""
    step.data.next_batch()
    return original(step, strategy)


@pytest.mark.parametrize(
    ("stage", "change"), [*((name, once_more) for name in STAGES), ("sft", of_another_pass)]
)
def test_rows_that_are_not_drawn_are_found(folder, tmp_path, monkeypatch, stage, change) -> None:
    calls(STAGES[stage][1], "drawn_places", change)(monkeypatch)
    train({"stage": stage, **settings(folder, stage, tmp_path, max_steps=1)})
    report = audit_step(tmp_path, 1)
    assert report.first_difference is not None, verdict(report)
    assert report.first_difference.quantity == COMPARED


@pytest.mark.full
def test_a_run_that_went_on_with_other_options_is_not_asked(folder, tmp_path) -> None:
    changes = {"max_steps": 1, "allow_changes": True}
    train({"stage": "sft", **settings(folder, "sft", tmp_path, **changes)})
    assert compared(audit_step(tmp_path, 1)).verdict == "not audited"


@pytest.mark.multiprocess
def test_two_ranks_raise_no_alarm(folder, tmp_path) -> None:
    options = settings(folder, "sft", tmp_path, micro_train_batch_size=1)
    train_on_ranks(2, [{"stage": "sft", **options}])
    assert_no_alarm(tmp_path)

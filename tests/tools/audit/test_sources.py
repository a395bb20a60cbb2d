"""What a step rests on beside its options, and runs that rest on something else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.tools.audit import world as step_world
from tests.tools.audit.faults import before_each_step, scaled

from lightrft.config import TrainConfig
from lightrft.strategy.optimizers import LearningRatePlan, PlannedLR
from lightrft.tools.audit import report as reports
from lightrft.tools.audit.findings import DIFFERS, EQUAL, NOT_AUDITED, Findings
from lightrft.tools.audit.record import CONFIG, read_record, step_folder
from lightrft.tools.audit.report import audit_step
from lightrft.tools.audit.sources import check_schedules, planned_steps
from lightrft.tools.audit.tolerances import tolerances_of

ADAPTERS = {"lora_rank": 2, "lora_alpha": 3.0, "train_batch_size": 16}


def scaled_first_column(part, factor):
    """Of pairs of adapters that cancel each other, one no longer does."""

    def change(main):
        for name, value in main.model.named_parameters():
            if part in name:
                value[:, 0].mul_(factor)

    return change


def row(report, quantity):
    return next(each for each in report.rows if each.quantity == quantity)


def differing(report):
    return [each.quantity for each in report.rows if each.verdict == DIFFERS]


# --- first weights


@pytest.mark.parametrize(
    "options, part, fault",
    [
        ({}, "mlp.up_proj", scaled),
        ({"advantage_estimator": "gae", "freezing_actor_steps": 1}, "self_attn", scaled),
        (ADAPTERS, "lora_B", scaled_first_column),
    ],
    ids=["all", "frozen", "adapters"],
)
def test_a_run_that_begins_with_other_weights_is_found(options, part, fault, audited, monkeypatch):
    changes = {"max_epochs": 1, **options}
    assert row(audited(changes), "first weights of the actor").verdict == EQUAL
    before_each_step(fault(part, 1.001))(monkeypatch)
    first = audited(changes).first_difference
    assert first.quantity == "first weights of the actor"
    assert part in first.note or "lora" in part


def test_what_is_frozen_keeps_its_first_weights(world, micro_model, tmp_path, monkeypatch):
    options = {"max_epochs": 1, **ADAPTERS}
    before_each_step(scaled("self_attn.q_proj.base_layer", 1.001))(monkeypatch)
    world.record_step(micro_model, tmp_path, options, steps=2)
    shutil.rmtree(step_folder(tmp_path, 1))
    assert audit_step(tmp_path).first_difference.quantity == "first weights of the actor"


def test_the_critic_begins_with_its_trunk(audited):
    report = audited({"advantage_estimator": "gae", "max_epochs": 1})
    assert row(report, "first weights of the critic").verdict == EQUAL


# --- length of the run


def lines(path, count):
    path.write_text("".join(json.dumps({"input": f"say {i}"}) + "\n" for i in range(count)))
    return str(path)


def test_the_length_of_a_run_is_that_of_its_options_and_data(audited, tmp_path, monkeypatch):
    data = lines(tmp_path / "rows.jsonl", 4)
    options = {"max_epochs": 1, "prompt_data": data, "prompt_max_len": 64}
    assert row(audited(options, steps=2), "steps of the run").verdict == EQUAL
    original = reports.read_record

    def longer(*args):
        record = original(*args)
        return replace(record, facts=replace(record.facts, num_planned=3))

    monkeypatch.setattr(reports, "read_record", longer)
    assert differing(audited(options, steps=2)) == ["steps of the run"]


def test_rows_that_may_be_too_long_and_data_that_changed_leave_the_length_open(
    world, micro_model, tmp_path
):
    world.record_step(micro_model, tmp_path / "run", {"max_epochs": 1})
    record = read_record(tmp_path / "run", 1)
    data = lines(tmp_path / "rows.jsonl", 8)
    config = TrainConfig(prompt_data=data, rollout_batch_size=4, prompt_max_len=64)

    def planned(**changes):
        return planned_steps(tmp_path / "run", record, config.replaced(changes))

    assert planned() == (2, 2)
    assert planned(max_steps=1) == (1, 1)
    assert planned(max_samples=4, num_episodes=3) == (3, 3)
    assert planned(prompt_max_len=5) == (1, 2)
    assert planned(apply_chat_template=True) == (1, 2)
    assert planned(prompt_data=str(tmp_path)) is None
    seen = {data: {"sha256": "another"}}
    (tmp_path / "run" / "run.json").write_text(json.dumps({"inputs": seen}))
    assert planned() is None


# --- the schedule


def test_a_schedule_that_was_never_changed_has_no_gap(audited, monkeypatch):
    original = PlannedLR.__init__

    def init(self, optimizer, plan):
        original(self, optimizer, replace(plan, changed_at=0, gap=-0.5))

    monkeypatch.setattr(PlannedLR, "__init__", init)
    report = audited({"max_epochs": 1, "lr_warmup_ratio": 0.5}, steps=1)
    assert report.first_difference.quantity == "change of the schedule, actor"


def test_a_run_that_is_made_longer_has_the_gap_of_its_two_plans(world, micro_model, tmp_path):
    options = {"max_epochs": 1, "lr_scheduler": "linear"}
    world.record_step(micro_model, tmp_path, options, steps=3)
    before, record = (read_record(tmp_path, step) for step in (2, 3))
    plans = [LearningRatePlan("linear", 0, steps, 0.1) for steps in (6, 12)]
    gap = plans[0](4) - plans[1](4)
    facts = record.facts.optimizers["actor"]

    def differences(before, **changes):
        own = {"actor": replace(facts, **changes)}
        found = Findings(tolerances_of("float32"))
        changed = replace(record, facts=replace(record.facts, optimizers=own))
        step = SimpleNamespace(results=found, record=changed)
        step.decided = SimpleNamespace(counts={"actor": 4})
        check_schedules(step, before)
        return [each.quantity for each in found.rows if each.verdict != EQUAL]

    assert gap < -0.1
    assert differences(before) == []
    longer = {"schedule_steps": 12, "schedule_changed_at": 4}
    assert differences(before, **longer, schedule_gap=gap) == []
    assert differences(before, **longer, schedule_gap=0.9 * gap) == ["size of it, actor"]
    assert differences(before, schedule_gap=0.1) == ["size of it, actor"]
    assert "change of the schedule, actor" in differences(before, schedule_steps=12)
    assert differences(None) == []
    assert differences(None, **longer) == ["change of the schedule, actor"]
    assert TrainConfig.load(record.folder / CONFIG).lr_scheduler == "linear"


# --- components of rewards


def with_parts(*weights):
    """Rewards of two functions that are added with these weights."""

    def change(number, item):
        if item.is_masked:
            return item
        parts = {"right": item.reward, "short": number % 3 / 2, "words": 7.0}
        reward = weights[0] * item.reward + weights[1] * parts["short"]
        return replace(item, reward=reward, unshaped_reward=reward, components=parts)

    return lambda samples: step_world.with_each(samples, change)


def test_rewards_are_the_weighted_sum_of_their_components(audited):
    options = {"max_epochs": 1, "reward_fn": ("a.py:right", "b.py:short")}
    name = "rewards from their components"
    weighted = {**options, "reward_weights": (1.0, 0.5)}
    assert row(audited(weighted, shape=with_parts(1.0, 0.5)), name).verdict == EQUAL
    assert differing(audited(weighted, shape=with_parts(1.0, 1.0))) == [name]
    assert row(audited(options, shape=with_parts(1.0, 1.0)), name).verdict == EQUAL
    assert row(audited(options), name).verdict == NOT_AUDITED

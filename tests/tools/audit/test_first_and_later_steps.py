"""The first step of a correct run and a later one, of every estimator, loss and correction."""

from __future__ import annotations

import shutil
from itertools import product

import pytest
from tests.tools.audit.test_no_false_alarm import LOSSES, NAMES, algorithm

from lightrft.config.registry import AGGREGATIONS
from lightrft.tools.audit.corrections import PRESETS
from lightrft.tools.audit.findings import DIFFERS, NOT_AUDITED
from lightrft.tools.audit.report import audit_step

pytestmark = pytest.mark.shard("audit_decisions")

CORRECTIONS = ("", *PRESETS)
# Settings that a step takes from the one before, or from its options alone.
SETTINGS = (
    {},
    {"init_kl_coef": 0.2, "kl_estimator": "k1", "kl_target": 0.1, "kl_horizon": 100},
    {"init_kl_coef": 0.2, "kl_estimator": "k3", "use_kl_loss": True, "max_epochs": 2},
    {"l2": 0.1, "lr_warmup_ratio": 0.4, "lr_scheduler": "linear", "max_norm": 0.3},
    {"lora_rank": 2, "lora_alpha": 3.0, "entropy_coef": 0.02},
    {"high_entropy_token_ratio": 0.4, "train_batch_size": 16, "advantages_norm": True},
    {"micro_batch_tokens": 60, "adam_betas": (0.8, 0.99)},
    {"train_batch_size": 16, "top_k": 6},
)
RUNNING = {"reward_running_norm": True, "reward_running_norm_minus_mean": True, "reward_clip": 1.0}
CELLS = [
    (
        name,
        loss,
        AGGREGATIONS[(i + j) % len(AGGREGATIONS)],
        CORRECTIONS[(i + 5 * j) % len(CORRECTIONS)],
        (2 * i + 3 * j) % len(SETTINGS),
    )
    for i, name in enumerate(NAMES)
    for j, loss in enumerate(LOSSES)
]


def options(name, loss, mode, correction, number):
    found = {**algorithm(name, loss, mode), "max_epochs": 1}
    found |= {"off_policy_correction": correction or None, **SETTINGS[number]}
    if name == "gae" and loss == "gspo":
        found["freezing_actor_steps"] = 1
    if name == "zero":
        found.pop("top_k", None)  # which teachers refuse
    if number % 2 == 0 and name not in ("maxrl", "gdpo"):
        found |= RUNNING
    return found


def alarms(cell, world, model, run, **changes):
    """What differs in the first step of a run and in the second."""
    shutil.rmtree(run, ignore_errors=True)
    settings = {**options(*cell), **changes}
    if "teacher" in settings:
        settings["teacher"] = world.write_model(run.parent / "teacher", seed=2)
    world.record_step(model, run, settings, steps=2, shape=world.shape_of(cell[0]))
    reports = [audit_step(run, step) for step in (1, 2)]
    for report in reports:
        assert sum(row.verdict != NOT_AUDITED for row in report.rows) > 20
    return [(cell, each.step, r) for each in reports for r in each.rows if r.verdict == DIFFERS]


def test_the_cells_are_all_pairs_and_two_hundred_steps():
    assert len({cell[:2] for cell in CELLS}) == len(NAMES) * len(LOSSES) > 100
    for position, values in enumerate((AGGREGATIONS, CORRECTIONS, range(len(SETTINGS))), start=2):
        assert {cell[position] for cell in CELLS} == set(values)
    for position, names in enumerate((NAMES, LOSSES)):
        assert {(cell[position], cell[2]) for cell in CELLS} == {*product(names, AGGREGATIONS)}


@pytest.mark.parametrize("cell", CELLS[:: len(CELLS) // 5], ids=str)
def test_some_correct_steps_have_no_difference(cell, world, micro_model, tmp_path):
    assert alarms(cell, world, micro_model, tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_correct_steps_have_no_difference(name, world, micro_model, tmp_path):
    found = []
    for cell in CELLS:
        if cell[0] == name:
            found += alarms(cell, world, micro_model, tmp_path / "run")
    assert found == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rate", [1e-2, 1e-5])
def test_correct_steps_in_bfloat16_have_no_difference(rate, world, micro_model, tmp_path):
    rates = {"actor_learning_rate": rate, "critic_learning_rate": rate}
    found = []
    for cell in CELLS[:: len(CELLS) // 25]:
        found += alarms(cell, world, micro_model, tmp_path / "run", bf16=True, **rates)
    assert found == []

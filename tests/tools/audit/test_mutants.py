"""Every mutant of the algorithms that changes a step is found by the audit of that step."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from lightrft.config.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "audit_mutants.py"
# Each of about the same number of mutants.
PARTS = {
    "policy": ("policy",),
    "advantages": ("advantages",),
    "corrections": ("corrections.py", "correction_terms.py"),
    "rest": (
        "aggregation.py",
        "kl.py",
        "masking.py",
        "moments.py",
        "value.py",
        "interface.py",
    ),
}


@pytest.fixture(scope="module")
def mutation():
    spec = importlib.util.spec_from_file_location("audit_mutants", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit_mutants"] = module
    spec.loader.exec_module(module)
    return module


def test_the_parts_are_all_of_the_algorithms(mutation):
    listed = {path for names in PARTS.values() for path in mutation.files_of(list(names))}
    left = {path.name for path in mutation.files_of([]) if path not in listed}
    # Functions of tokens, sums and scores, which the tests of formulas compare one by one.
    others = {"preference_losses.py", "reward_losses.py", "supervised_losses.py"}
    assert left == {"__init__.py", *others}


def test_the_steps_use_every_loss_and_estimator(mutation):
    steps = [{**mutation.DEFAULTS, **step} for step in mutation.STEPS]
    for option, names, same in (
        ("policy_loss", POLICY_LOSSES, {"clipped"}),
        ("advantage_estimator", ADVANTAGE_ESTIMATORS, {"grpo"}),
        ("kl_estimator", KL_ESTIMATORS, set()),
    ):
        assert {step.get(option) for step in steps} - {None} == set(names) - same


@pytest.mark.slow
@pytest.mark.timeout(3500)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, marks=pytest.mark.shard(f"audit_{shard}"), id=names[0])
        for shard, names in PARTS.items()
    ],
)
def test_no_mutant_that_changes_a_step_is_missed(names, mutation, capsys):
    code = mutation.main(list(names))
    lines = capsys.readouterr().out.splitlines()
    counts = json.loads(lines[-1])
    assert code == 0, lines
    assert counts["found"] > 20

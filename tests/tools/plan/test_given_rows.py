"""A plan of the stages on given rows against the live tensors of their steps on two ranks."""

import pytest
from tests.ranks import run_multiprocess
from tests.tools.plan import given_stages, two_ranks

from lightrft.tools.plan import setup as plan_setup
from lightrft.tools.plan.memory import plan_memory, rank_bytes
from lightrft.tools.plan.setup import ModelSize, Setup

pytestmark = pytest.mark.shard("planning")


STAGES = {"sft": 1, "prefer": 2, "reward": 2, "divergence": 1}
TOLERANCE = 0.10
STATES = ("weights, sharded", "Adam's states", "reference", "teacher")


def plan(stage):
    size = ModelSize.of_config(two_ranks.model_config(given_stages.SIZES).to_dict())
    config, rows = given_stages.run_config(stage), STAGES[stage]
    setup = Setup(config, size, 2, 2, False, 1e12, "hf", stage=stage, rows_per_item=rows)
    return plan_memory(setup).phases


def predict(stage, forgets=()):
    """Bytes between steps, and at the peak of one; some terms may be left out."""
    phases = plan(stage)
    kept = [[term for term in phase.terms if term.name not in forgets] for phase in phases]
    states = [term for term in kept[-1] if term.name in STATES]
    peaks = [rank_bytes(p) for p, phase in zip(kept, phases, strict=True) if phase.name != "load"]
    return rank_bytes(states), max(peaks)


def check(predicted, found):
    states, peak = predicted
    assert states == pytest.approx(found["idle"], rel=0.02), states / found["idle"]
    assert peak == pytest.approx(found["peak"], rel=TOLERANCE), peak / found["peak"]


@pytest.mark.full
@pytest.mark.multiprocess
def test_stages_on_given_rows_hold_what_the_plan_says(monkeypatch):
    size = ModelSize.of_config(two_ranks.model_config(given_stages.SIZES).to_dict())
    monkeypatch.setattr(plan_setup, "read_model_size", lambda path: size)
    ranks = run_multiprocess(
        given_stages.measure_all, 2, timeout_seconds=400, args=(tuple(STAGES),)
    )
    for stage, found in ranks[0].items():
        check(predict(stage), found)
        names = {term.name for phase in plan(stage) for term in phase.terms}
        for forgotten in {"Adam's states", "activations", "reference", "teacher"} & names:
            with pytest.raises(AssertionError):
                check(predict(stage, forgets=[forgotten]), found)

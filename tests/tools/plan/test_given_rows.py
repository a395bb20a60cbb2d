"""A plan of the stages on given rows against the live tensors of their steps on two ranks."""

import pytest
from tests.ranks import run_multiprocess
from tests.tools.plan import given_stages
from tests.tools.plan.test_live_bytes import check

from lightrft.tools.plan import setup as plan_setup
from lightrft.tools.plan.memory import plan_memory, rank_bytes
from lightrft.tools.plan.setup import Setup
from lightrft.tools.plan.sizes import ModelSize

pytestmark = pytest.mark.shard("planning")

STAGES = {"sft": 1, "prefer": 2, "reward": 2, "divergence": 1}
STATES = ("weights, sharded", "Adam's states", "reference", "teacher")


def setup_of(stage, sizes, options):
    config = given_stages.run_config(stage, sizes, options)
    size = ModelSize.of_config(given_stages.two_ranks.model_config(sizes).to_dict())
    rows = STAGES[stage]
    return Setup(config, size, 2, 2, False, 1e12, "hf", stage=stage, rows_per_item=rows)


def predict(stage, sizes, options, forgets=()):
    """Bytes between steps, and at the peak of one; some terms may be left out."""
    phases = plan_memory(setup_of(stage, sizes, options)).phases
    kept = [[term for term in phase.terms if term.name not in forgets] for phase in phases]
    states = [term for term in kept[-1] if term.name in STATES]
    peaks = [rank_bytes(p) for p, phase in zip(kept, phases, strict=True) if phase.name != "load"]
    return rank_bytes(states), max(peaks)


def compare(sizes, options, patch):
    size = ModelSize.of_config(given_stages.two_ranks.model_config(sizes).to_dict())
    patch.setattr(plan_setup, "read_model_size", lambda path: size)
    arguments = (tuple(STAGES), sizes, options)
    measured = run_multiprocess(given_stages.measure_all, 2, timeout_seconds=400, args=arguments)[0]
    for stage, found in measured.items():
        check(predict(stage, sizes, options), found)
        controls = [] if options.get("lora_rank") else ["Adam's states"]
        controls += ["activations"]
        controls += [
            n for n in ("reference", "teacher") if n in predicted_names(stage, sizes, options)
        ]
        for forgotten in controls:
            with pytest.raises(AssertionError):
                check(predict(stage, sizes, options, forgets=[forgotten]), found)


def predicted_names(stage, sizes, options):
    phases = plan_memory(setup_of(stage, sizes, options)).phases
    return {term.name for phase in phases for term in phase.terms}


@pytest.mark.full
def test_stages_on_given_rows_hold_what_the_plan_says(monkeypatch):
    compare(given_stages.SIZES, {"fsdp": True}, monkeypatch)

"""A plan against the live tensors, and the resident memory, of real updates on two ranks."""

from __future__ import annotations

import pytest
from tests.ranks import run_multiprocess
from tests.tools.plan import two_ranks

from lightrft.tools.plan.memory import resting, train_peak
from lightrft.tools.plan.setup import ModelSize, Setup

pytestmark = pytest.mark.shard("planning")

STRATEGIES = {
    "fsdp2": {"fsdp": True},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
}
TOLERANCE = 0.10


def setup_of(sizes, options):
    config = two_ranks.run_config(sizes, options)
    size = ModelSize.of_config(two_ranks.model_config(sizes).to_dict())
    return Setup(config, size, 2, 2, False, 1e12, "hf")


def predict(sizes, options, forgets=()):
    """Bytes between updates, and at the peak of one; some terms may be left out."""
    setup = setup_of(sizes, options)
    kept = [term for term in resting(setup, setup.actor) if term.name not in forgets]
    states = sum(term.num_bytes for term in kept)
    return states, states + sum(term.num_bytes for term in train_peak(setup, setup.actor))


def measure(sizes, options):
    # On this model a step is small against a rank's start.
    return run_multiprocess(two_ranks.measure, 2, timeout_seconds=250, args=(sizes, options))[0]


def check(predicted, found):
    states, peak = predicted
    assert states == pytest.approx(found["idle"], rel=0.02), states / found["idle"]
    assert peak == pytest.approx(found["peak"], rel=TOLERANCE), peak / found["peak"]


def compare(sizes, options):
    found = measure(sizes, options)
    check(predict(sizes, options), found)
    # Every comparison is its own control: it fails by far if Adam's states are forgotten.
    forgetful = predict(sizes, options, forgets=["Adam's states"])
    with pytest.raises(AssertionError):
        check(forgetful, found)
    assert forgetful[0] < 0.75 * found["idle"]


@pytest.mark.full
@pytest.mark.multiprocess
def test_fsdp2_holds_what_the_plan_says():
    compare(two_ranks.SIZES, STRATEGIES["fsdp2"])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.deepspeed
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_holds_what_the_plan_says(name, bf16):
    sizes = {**two_ranks.SIZES, "bf16": bf16}
    compare(sizes, STRATEGIES[name])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "change", [{"hidden": 512}, {"rows": 4, "seq": 256}, {"rows": 8, "seq": 256}]
)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_plan_follows_a_wider_model_and_a_larger_batch(name, change):
    compare({**two_ranks.SIZES, **change}, STRATEGIES[name])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.deepspeed
@pytest.mark.parametrize("name", STRATEGIES)
def test_resident_memory_grows_as_the_plan_says(name):
    # Large enough that tensors are nearly all of what a process gains.
    sizes = {**two_ranks.SIZES, "hidden": 512, "rows": 2, "seq": 128, "vocab": 16000}
    options = STRATEGIES[name]
    arguments = (sizes, options)
    found = run_multiprocess(two_ranks.measure_resident, 2, timeout_seconds=280, args=arguments)[0]
    tensors = measure(sizes, options)["peak"]
    peak = predict(sizes, options)[1]
    assert tensors >= 0.8 * found["resident"]
    assert peak == pytest.approx(tensors, rel=TOLERANCE)
    # Beside tensors there are buffers of gloo and oneDNN, and threads' stacks.
    assert peak == pytest.approx(found["resident"], rel=TOLERANCE), peak / found["resident"]
    forgetful = predict(sizes, options, forgets=["Adam's states"])[1]
    assert forgetful < (1 - TOLERANCE) * found["resident"]

"""A plan against the live tensors, and the resident memory, of real updates on two ranks."""

import pytest
from tests.ranks import run_multiprocess
from tests.tools.plan import two_ranks

from lightrft.tools.plan import memory
from lightrft.tools.plan.memory import moments, resting
from lightrft.tools.plan.setup import Setup
from lightrft.tools.plan.sizes import ModelSize

pytestmark = pytest.mark.shard("planning")

STRATEGIES = {
    "fsdp2": {"fsdp": True},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
}
TOLERANCE = 0.10


def predict(sizes, options, factors=()):
    """Bytes between updates, and at the peak of one, with some terms multiplied."""
    factors, config = dict(factors), two_ranks.run_config(sizes, options)
    size = ModelSize.of_config(two_ranks.model_config(sizes).to_dict())
    setup = Setup(config, size, sizes["world"], 2, False, 1e12, "hf")

    def total(terms):
        return sum(term.num_bytes * factors.get(term.name, 1) for term in terms)

    states = total(resting(setup, setup.actor))
    return states, states + max(map(total, moments(setup, setup.actor)))


def measure(sizes, options):
    # On this model a step is small against a rank's start.
    arguments = (sizes, options)
    world = sizes["world"]
    return run_multiprocess(two_ranks.measure, world, timeout_seconds=250, args=arguments)[0]


def check(predicted, found):
    states, peak = predicted
    assert states == pytest.approx(found["idle"], rel=0.02), states / found["idle"]
    assert peak == pytest.approx(found["peak"], rel=TOLERANCE), peak / found["peak"]


def compare(sizes, options):
    found = measure(sizes, options)
    check(predict(sizes, options), found)
    # Every comparison is its own control: it fails by far if Adam's states are forgotten.
    forgetful = predict(sizes, options, {"Adam's states": 0})
    with pytest.raises(AssertionError):
        check(forgetful, found)
    assert forgetful[0] < 0.75 * found["idle"]


@pytest.mark.full
def test_fsdp2_holds_what_the_plan_says():
    compare(two_ranks.SIZES, STRATEGIES["fsdp2"])


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_holds_what_the_plan_says(name, bf16):
    sizes = {**two_ranks.SIZES, "bf16": bf16}
    compare(sizes, STRATEGIES[name])


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "change", [{"hidden": 512}, {"rows": 4, "seq": 256}, {"rows": 8, "seq": 256}]
)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_plan_follows_a_wider_model_and_a_larger_batch(name, change):
    compare({**two_ranks.SIZES, **change}, STRATEGIES[name])


@pytest.mark.slow
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
    forgetful = predict(sizes, options, {"Adam's states": 0})[1]
    assert forgetful < (1 - TOLERANCE) * found["resident"]


# Shapes of a model with 135 million weights; Adam's states are small beside them.
OF_135M = {"hidden": 576, "intermediate": 1536, "kv_heads": 3, "layers": 30, "vocab": 49152}
OF_135M |= {"is_tied": True, "seq": 64}


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lora_sync", [None, "merged"])
def test_a_base_of_4_bits_and_its_engine_hold_what_the_plan_says(lora_sync, bf16):
    compare_beside_engine(OF_135M | {"world": 1, "bf16": bf16}, 16, lora_sync)


@pytest.mark.full
def test_engines_of_two_ranks_hold_packed_bytes_as_planned():
    compare_beside_engine({"vocab": 1000, "hidden": 512, "seq": 8}, 2, None)


def compare_beside_engine(changes, lora_rank, lora_sync):
    pytest.importorskip("bitsandbytes", reason="package bitsandbytes is not installed")
    sizes = two_ranks.SIZES | changes
    options = {"fsdp": True, "lora_rank": lora_rank, "quantize": "nf4"}
    options |= {"enable_engine_sleep": False}
    arguments = (sizes, options | {"lora_sync": lora_sync})
    measure_both = two_ranks.measure_with_engine
    measured, *_ = run_multiprocess(
        measure_both, sizes["world"], timeout_seconds=280, args=arguments
    )
    planned, dense = (planned_phases(sizes, options, each) for each in (lora_sync, "merged"))
    ratios = {phase: planned[phase] / size for phase, size in measured.items()}
    assert ratios == dict.fromkeys(ratios, pytest.approx(1, rel=TOLERANCE))
    if lora_sync is None:  # a whole base in the engine would be found
        assert all(dense[phase] > 1.3 * size for phase, size in measured.items())


def planned_phases(sizes, options, lora_sync):
    """Planned bytes of each phase on one rank."""
    config = two_ranks.run_config(sizes, options | {"lora_sync": lora_sync})
    size = ModelSize.of_config(two_ranks.model_config(sizes).to_dict())
    plan = memory.plan_memory(Setup(config, size, sizes["world"], 2, False, 1e12, "hf"))
    return {phase.name: phase.device_bytes for phase in plan.phases}


FSDP2, ZERO1, ZERO2, ZERO3 = STRATEGIES.values()
SHORT = {"hidden": 128, "layers": 2, "vocab": 8000, "seq": 16}
ALONE = {"world": 1}
QUANTIZED = {"lora_rank": 2, "quantize": "nf4"}
LAYERS = {"layers": 3, "vocab": 64, "hidden": 512, "seq": 8}
# Terms that are small in most runs, where they are large: options, sizes, and their names.
CASES = {
    "long rows": (
        FSDP2 | {"gradient_checkpointing": True},
        {"layers": 1, "vocab": 64, "hidden": 128, "seq": 2048},
        ["backward pass of a layer"],
    ),
    "large layers": (
        FSDP2,
        {"layers": 3, "vocab": 64, "hidden": 512, "seq": 8},
        ["gathered layers", "a layer's gradients", "gradients, sharded"],
    ),
    "fsdp2, adapters": (FSDP2 | {"lora_rank": 2}, SHORT, ["end, as it is gathered"]),
    "fsdp2, 4 bits": (FSDP2 | QUANTIZED, LAYERS, ["weights, sharded", "gathered layers"]),
    "fsdp2, 4 bits, bfloat16": (FSDP2 | QUANTIZED, LAYERS | {"bf16": True}, ["weights, sharded"]),
    "fsdp2 alone, large layers": (FSDP2, LAYERS | ALONE, ["gradients, sharded"]),
    "fsdp2 alone, adapters": (
        FSDP2 | {"lora_rank": 2},
        SHORT | ALONE,
        ["weights, sharded"],
    ),
    "fsdp2 alone, untied": (FSDP2, SHORT | ALONE, ["gradients of an end"]),
    "fsdp2 alone, tied": (FSDP2, SHORT | ALONE | {"is_tied": True}, ["gradients of an end"]),
    "fsdp2 alone, tied, adapters": (
        FSDP2 | {"lora_rank": 16},
        SHORT | ALONE | {"is_tied": True},
        ["weights of an end"],
    ),
    "fsdp2 alone, 4 bits": (FSDP2 | QUANTIZED, LAYERS | ALONE, ["weights, sharded"]),
    "fsdp2, untied": (FSDP2, SHORT, ["gradients of an end"]),
    "fsdp2, tied": (FSDP2, SHORT | {"is_tied": True}, ["gradients of an end"]),
    "zero1, tied": (
        ZERO1,
        SHORT | {"is_tied": True},
        ["gradient of one tensor", "bucket of gradients", "gradients"],
    ),
    "zero1, bf16": (ZERO1, {"seq": 8, "bf16": True}, ["gradients in bfloat16"]),
    "zero2, tied": (
        ZERO2,
        SHORT | {"is_tied": True},
        ["gradient of one tensor", "buckets of gradients"],
    ),
    "zero2, small bucket": (ZERO2, {"seq": 8, "bucket": 100_000}, ["gradients of the step"]),
    "zero3, small weights": (
        ZERO3,
        {"hidden": 128, "layers": 8, "vocab": 64},
        ["small weights, whole", "bucket of gradients", "copies of the bucket"],
    ),
    "zero3, adapters": (ZERO3 | {"lora_rank": 2}, {"seq": 8}, ["gathered weights"]),
}
# Of the peak: what is recomputed is planned a tenth too large.
TOLERANCES = dict.fromkeys(CASES, 0.02) | {"long rows": 0.12, "fsdp2, adapters": 0.03}
TOLERANCES |= {"fsdp2 alone, untied": 0.03, "fsdp2 alone, tied, adapters": 0.03}
TOLERANCES |= {case: 0.05 for case in CASES if "4 bits" in case}


def predict_small(case, wrong=None, factor=1.0):
    """Bytes between updates and at the peak of one, with one term multiplied."""
    options, changes, _ = CASES[case]
    sizes = {**two_ranks.SIZES, **changes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "ZERO_BUCKET", sizes["bucket"])
        return predict(sizes, options, {wrong: factor})


def is_close(predicted, wanted, tolerance):
    # Between updates there are only whole tensors, whose number is known.
    return predicted[0] == pytest.approx(wanted[0], rel=0.02) and predicted[1] == pytest.approx(
        wanted[1], rel=tolerance
    )


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_by_half_in_a_term_would_be_found(case):
    right = predict_small(case)
    tolerance = TOLERANCES[case]
    for name in CASES[case][2]:
        for factor in (0.5, 1.5):
            # Twice, since what is measured may be off to the other side.
            wrong = predict_small(case, name, factor)
            assert not is_close(wrong, right, 2 * tolerance), (name, factor)


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("case", CASES)
def test_a_term_that_is_small_in_most_runs_is_what_the_plan_says(case):
    options, changes, _ = CASES[case]
    found = measure({**two_ranks.SIZES, **changes}, options)
    idle, peak = predict_small(case)
    ratios = idle / found["idle"], peak / found["peak"]
    assert is_close((idle, peak), (found["idle"], found["peak"]), TOLERANCES[case]), ratios

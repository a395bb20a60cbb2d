"""One whole step of training - rollout, reward, forward passes, updates of actor and critic, weight
sync - gives the same metrics and weights on any number of processes and in any layout.
"""

import math
from importlib.util import find_spec

import pytest
from tests.runs import OF_THE_MACHINE, rollout_options, tiny_models, train_on_ranks, write_inputs

pytestmark = pytest.mark.shard("invariance")

REWARD = """
def score(responses):
    return [(sum(map(ord, text)) % 7) / 7 for text in responses]
"""
PADDED = {}
PACKED = {"packing_samples": True, "micro_batch_tokens": 70}
SHARED = {"packing_samples": True, "micro_batch_tokens": 150, "shared_prefix": "auto"}
ALONE = (PADDED, {"micro_train_batch_size": 4}, PACKED, SHARED)
TWO = (
    {**SHARED, "gradient_checkpointing": True, "fused_linear_logprob": True},
    {"sp_size": 2, **SHARED},
    {**PACKED, "gradient_checkpointing": True},
    {"sp_size": 2, **PACKED, "fused_linear_logprob": True},
    {"fsdp": False, "zero_stage": 2, "sp_size": 2, "micro_train_batch_size": 4},
)
FOUR = (
    PADDED,
    {"packing_samples": True},
    {"fsdp": False, "zero_stage": 3, **SHARED},
    {"sp_size": 2, "micro_train_batch_size": 1},
    {"fsdp": False, "zero_stage": 3, "sp_size": 2, "packing_samples": True},
    {"sp_size": 4, "packing_samples": True},
)


def run(folder, world_size, variants):
    """Metrics and folder of the trained model of each variant."""
    names = [f"run_{world_size}_{i}" for i in range(len(variants))]
    runs = [
        rollout_options(
            folder,
            name,
            generate_max_len=12,
            max_steps=1,
            advantage_estimator="gae",
            init_kl_coef=0.05,
            use_kl_loss=True,
            entropy_coef=0.01,
            high_entropy_token_ratio=0.6,
            off_policy_correction="tis",
            loss_agg_mode="token-mean",
            critic_learning_rate=1e-3,
            max_norm=0.5,
            **variant,
        )
        for name, variant in zip(names, variants, strict=True)
    ]
    ranks = train_on_ranks(world_size, runs, timeout_seconds=850)
    found = [[summary["last_metrics"] for summary in summaries] for summaries in ranks]
    for metrics in zip(*found, strict=True):
        assert all(timeless(m) == timeless(metrics[0]) for m in metrics)
    return list(zip(found[0], (str(folder / name) for name in names), strict=True))


def timeless(metrics):
    machine = ("engine_hash", *OF_THE_MACHINE)
    return {n: v for n, v in metrics.items() if not any(word in n for word in machine)}


def update_of(folder, output):
    from safetensors.torch import load_file

    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(f"{output}/model/model.safetensors")
    return {name: after[name].double() - before[name].double() for name in before}


def assert_same_step(folder, found, expected):
    """Metrics to a few roundings; the weights' change by AdamW to 1e-3 in norm."""
    (metrics, output), (wanted, reference) = found, expected
    assert set(timeless(metrics)) == set(timeless(wanted))
    for name, value in timeless(wanted).items():
        # Extremes are single logprobs, whose roundings do not average out.
        tolerance = 1e-4 if "max" in name or "min" in name or "diff" in name else 2e-6
        assert metrics[name] == pytest.approx(value, rel=2e-4, abs=tolerance), name
    update, right = update_of(folder, output), update_of(folder, reference)
    difference = sum(float((update[n] - right[n]).square().sum()) for n in right)
    norm = sum(float(right[n].square().sum()) for n in right)
    assert math.sqrt(difference / norm) <= 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    vowels = ["aeiou"[i % 5] * (1 + 3 * (i % 4)) for i in range(8)]
    rows = [{"prompt": f"now please say {text}"} for text in vowels]
    folder = tiny_models(tmp_path_factory.mktemp("full_step"), "model")
    return write_inputs(folder, rows, reward=REWARD)


@pytest.fixture(scope="module")
def alone(folder):
    return run(folder, 1, ALONE)


def available(variants):
    has_deepspeed = find_spec("deepspeed") is not None
    return [v for v in variants if has_deepspeed or "zero_stage" not in v]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_one_process_gives_the_same_step_in_any_layout(folder, alone):
    expected, *others = alone
    assert expected[0]["grad_norm"] > 0.5  # clipped
    assert expected[0]["critic_loss"] > 0
    for found in others:
        assert_same_step(folder, found, expected)
    # The comparison notices another step.
    planted = ({**expected[0], "policy_loss": expected[0]["policy_loss"] + 1e-4}, expected[1])
    with pytest.raises(AssertionError, match="policy_loss"):
        assert_same_step(folder, planted, expected)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "count, cells",
    [
        pytest.param(2, TWO, marks=pytest.mark.full),
        pytest.param(4, FOUR, marks=pytest.mark.slow),
    ],
)
def test_several_processes_give_the_step_of_one(folder, alone, count, cells):
    for found in run(folder, count, available(cells)):
        assert_same_step(folder, found, alone[0])

"""One whole step of training - rollout, reward, forward passes, updates of actor and critic, weight
sync - gives the same metrics and weights on any number of processes and in any layout.
"""

import json
import math
from importlib.util import find_spec

import pytest
from tests.ranks import run_multiprocess

from lightrft.tools.model_presets import write_tiny_model

pytestmark = [pytest.mark.shard("invariance"), pytest.mark.multiprocess]

REWARD = """
def score(responses):
    return [(sum(map(ord, text)) % 7) / 7 for text in responses]
"""
PADDED = {"fsdp": True, "micro_train_batch_size": 2}
PACKED = {"packing_samples": True, "micro_batch_tokens": 70}
ALONE = (PADDED, {**PADDED, "micro_train_batch_size": 4}, {"fsdp": True, **PACKED})
TWO = (
    {"fsdp": True, **PACKED, "gradient_checkpointing": True},
    {"fsdp": True, "sp_size": 2, **PACKED, "fused_linear_logprob": True},
    {"zero_stage": 2, "sp_size": 2, "micro_train_batch_size": 4},
)
FOUR = (
    PADDED,
    {"fsdp": True, "packing_samples": True},
    {"fsdp": True, "sp_size": 2, "micro_train_batch_size": 1},
    {"zero_stage": 3, "sp_size": 2, "packing_samples": True},
    {"fsdp": True, "sp_size": 4, "packing_samples": True},
)


def train_each(rank, world_size, runs):
    from dataclasses import asdict

    from lightrft.config import TrainConfig
    from lightrft.run.assembly import run_training
    from lightrft.strategy.distributed.process_groups import start_process_group

    # Kept over all runs: to end one and start the next at the same address is a race.
    start_process_group(None)
    return [asdict(run_training(TrainConfig(**values)))["last_metrics"] for values in runs]


def run(folder, world_size, variants):
    """Metrics and folder of the trained model of each variant."""
    common = {
        "pretrain": str(folder / "model"),
        "prompt_data": str(folder / "train.jsonl"),
        "input_key": "prompt",
        "reward_fn": (f"{folder / 'reward.py'}:score",),
        "bf16": False,
        "engine_type": "hf",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "train_batch_size": 8,
        "generate_max_len": 12,
        "prompt_max_len": 32,
        "max_steps": 1,
        "advantage_estimator": "gae",
        "init_kl_coef": 0.05,
        "use_kl_loss": True,
        "entropy_coef": 0.01,
        "high_entropy_token_ratio": 0.6,
        "off_policy_correction": "tis",
        "loss_agg_mode": "token-mean",
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "lr_warmup_ratio": 0.0,
        "max_norm": 0.5,
    }
    outputs = [str(folder / f"run_{world_size}_{i}") for i in range(len(variants))]
    runs = [{**common, **v, "output_dir": out} for v, out in zip(variants, outputs, strict=True)]
    ranks = run_multiprocess(train_each, world_size, timeout_seconds=850, args=(runs,))
    for metrics in zip(*ranks, strict=True):
        assert all(timeless(m) == timeless(metrics[0]) for m in metrics)
    return list(zip(ranks[0], outputs, strict=True))


def timeless(metrics):
    return {
        name: value
        for name, value in metrics.items()
        if "second" not in name
        and not name.startswith("memory/")
        and name != "engine_hash"
        and "mfu" not in name
    }


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
    folder = tmp_path_factory.mktemp("full_step")
    write_tiny_model(folder / "model", "tiny-qwen3", seed=1)
    rows = [json.dumps({"prompt": f"say {'aeiou'[i % 5] * (1 + 3 * (i % 4))}"}) for i in range(8)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


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


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_processes_give_the_step_of_one(folder, alone):
    for found in run(folder, 2, available(TWO)):
        assert_same_step(folder, found, alone[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_processes_give_the_step_of_one(folder, alone):
    for found in run(folder, 4, available(FOUR)):
        assert_same_step(folder, found, alone[0])

"""Operations of an update against torch's own count of every matrix product."""

import numpy as np
import pytest
import torch
from tests.models.tiny import tiny_config
from torch.utils.flop_counter import FlopCounterMode

from lightrft.config import TrainConfig
from lightrft.models import Actor
from lightrft.run.throughput import TrainingFlops, peak_tflops, training_flops, utilisation
from lightrft.stages.stage import Work
from lightrft.strategy.weight_sync.parameter_source import module_parameter_source
from lightrft.tools.model_presets import PRESETS


def tiny_actor(preset):
    from transformers import AutoModelForCausalLM

    config = PRESETS[preset]()
    return Actor(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-llama"])
def test_operations_are_those_that_torch_counts(preset):
    actor = tiny_actor(preset)
    length, num_rows = 24, 3
    token_ids = torch.randint(0, 200, (num_rows, length))
    mask = torch.ones_like(token_ids).bool()
    scored = torch.zeros_like(mask)
    scored[:, 10:] = True
    with FlopCounterMode(display=False) as counter:
        actor(token_ids, mask, scored_mask=scored).logprobs.sum().backward()
    flops = training_flops(actor, module_parameter_source(actor))
    lengths, responses = np.full(num_rows, length), np.full(num_rows, 14)
    # Without a causal kernel torch computes all pairs of tokens, and the first layer needs no
    # gradient of its input.
    attention = flops.per_squared_length * float((lengths**2).sum())
    expected = flops.total(lengths, responses) + attention
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_frozen_weights_and_idle_experts_cost_less():
    from transformers import Qwen3MoeForCausalLM

    actor = tiny_actor("tiny-qwen3")
    before = training_flops(actor, module_parameter_source(actor))
    actor.requires_grad_(False)
    after = training_flops(actor, module_parameter_source(actor))
    assert after.per_token == pytest.approx(before.per_token * 4 / 6)
    config = tiny_config(
        "qwen3_moe",
        initializer_range=0.02,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_experts=8,
        num_experts_per_tok=2,
    )
    model = Actor(Qwen3MoeForCausalLM(config))
    experts = 6 * (8 * 64 * 64 + 8 * 64 * 32)
    # q and o, k and v, and the router.
    others = 6 * (2 * 64 * 64 + 2 * 64 * 32 + 8 * 64)
    assert training_flops(model, module_parameter_source(model)).per_token == experts / 4 + others


def test_utilisation_is_the_share_of_all_devices_peak():
    work = Work(("actor",), np.array([4, 6]), np.array([1, 2]), 2)
    model = TrainingFlops(1e12, 1e11, 1e10)
    total = 2 * (10e12 + 3e11 + 52e10)
    found = utilisation([model], work, seconds=5.0, num_devices=4, peak=2.0)
    assert found["train_tflops_per_second"] == pytest.approx(total / 5 / 4 / 1e12)
    assert found["mfu"] == pytest.approx(found["train_tflops_per_second"] / 2)
    unknown = utilisation([model], work, seconds=1.0, num_devices=4, peak=None)
    assert "mfu" not in unknown
    assert peak_tflops(TrainConfig(peak_tflops=3.0)) == 3.0

"""bfloat16 training adds gradients up in float32, with every strategy.

The first micro-batch has a gradient of 1, the next 256 one of 2^-8 each. In bfloat16, 1 + 2^-8
rounds back to 1, so a sum in bfloat16 stays at 1, where the true one is 2.
"""

import os
from contextlib import suppress
from itertools import product

import pytest
import torch
from tests.ranks import run_multiprocess

SMALL_STEPS = 256
SETTINGS = {
    "bf16": True,
    "engine_type": "hf",
    "timeout_minutes": 2.0,
    "train_batch_size": 2,
    "micro_train_batch_size": 1,
}
CASES = {
    **{
        f"ZeRO-{stage}, adam_offload={offload}, overlap_comm={overlap}": {
            "fsdp": False,
            "zero_stage": stage,
            "adam_offload": offload,
            "overlap_comm": overlap,
        }
        for stage, offload, overlap in product((1, 2, 3), (False, True), (False, True))
        if stage == 2 or not overlap
    },
    **{
        f"FSDP2, use_mp_opt={masters}, cpu_offload={offload}": {
            "fsdp": True,
            "use_mp_opt": masters,
            "fsdp_cpu_offload": offload,
        }
        for masters, offload in product((False, True), (False, True))
    },
    "FSDP2 on a hybrid mesh, use_mp_opt": {"fsdp": True, "use_mp_opt": True, "hybrid": True},
}


class Weights(torch.nn.Module):
    """The gradient of each of its two weights is the input."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, scale):
        return (self.weight * scale.to(self.weight.dtype)).float().sum()


def norm_of_sum(case, world_size):
    """Of two optimizer steps: the reported norm for each of the two gradients."""
    from lightrft.strategy import get_strategy

    options = dict(case)
    shard_size = 1 if options.pop("hybrid", False) else -1
    with get_strategy({**SETTINGS, "max_norm": 0.0, **options}) as strategy:
        model = Weights()
        if options["fsdp"]:
            model = strategy.prepare_model(model, is_training=True, shard_size=shard_size)
        optimizer = strategy.create_optimizer(model, lr=0.0)
        ready = strategy.prepare((model, optimizer, None))
        norms = []
        for num_small in (SMALL_STEPS, 16):  # the second step starts from nothing again
            scales = [1.0] + [2.0**-8] * num_small
            with strategy.accumulation(len(scales), ready.optimizer):
                for scale in scales:
                    loss = ready.model(torch.tensor(scale)) / world_size
                    strategy.backward(loss, ready.model, ready.optimizer)
                    result = strategy.optimizer_step(ready.optimizer, ready.model, None)
            norms.append(result.grad_norm / 2**0.5)
            give_up_a_step(strategy, ready)
        return norms


def give_up_a_step(strategy, ready):
    """Leaves gradients of a step that never ends, which the next one must not see."""
    with suppress(KeyboardInterrupt), strategy.accumulation(2, ready.optimizer):
        strategy.backward(ready.model(torch.tensor(8.0)), ready.model, ready.optimizer)
        strategy.optimizer_step(ready.optimizer, ready.model, None)
        raise KeyboardInterrupt


def program(rank, world_size):
    torch.distributed.init_process_group("gloo")
    os.environ["LOCAL_RANK"] = str(rank)
    return {name: norm_of_sum(case, world_size) for name, case in CASES.items()}


@pytest.mark.full
@pytest.mark.deepspeed
def test_bfloat16_gradients_are_added_up_in_float32():
    pytest.importorskip("deepspeed")
    for found in run_multiprocess(program, 2, timeout_seconds=240):
        for name, norms in found.items():
            assert norms == pytest.approx([2.0, 1.0625], abs=1e-6), name

"""One micro batch and one optimizer step with fake tensors on a fake H100; see `fake_cuda.py`.

Arguments: a JSON list of cases; prints a JSON list of what was seen.
"""

import dataclasses
import gc
import json
import sys

import live_bytes
import peft  # noqa: F401  # what it makes on import would land on the device
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, masking_utils

from lightrft.algorithms.aggregation import aggregate
from lightrft.algorithms.policy.clipped import clipped_policy_loss
from lightrft.config import TrainConfig
from lightrft.models import Actor, LoraActor, TokenLayout, varlen
from lightrft.models.layout import LayoutPolicy

# It looks for sequences in the positions' values, which fake tensors have none of.
masking_utils.find_packed_sequence_indices = lambda position_ids: None
# Nor has a trial numbers to compare.
varlen.run_trial = lambda shape: varlen.KernelTrial(True, "fake")


@dataclasses.dataclass(frozen=True)
class Given(LayoutPolicy):
    """One layout, made beforehand."""

    layout: TokenLayout | None = None

    def lay_out(self, token_ids, attention_mask, scored_mask=None, **options):
        return self.layout


def on_cuda(value):
    return torch.empty(value.shape, dtype=value.dtype, device="cuda")


def fake_layout(case):
    ids = torch.full((case["rows"], case["tokens"]), 5)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[-1, -case["padding"] :] = case["padding"] == 0
    scored = mask.clone()
    scored[:, : case["prompt"]] = False
    make = TokenLayout.packed if case["packed"] else TokenLayout.padded
    layout = make(ids, mask, scored)
    if case["masked"]:
        layout = dataclasses.replace(layout, is_right_padded=False)
    return layout, int(scored.sum())


def to_fake(layout):
    fields = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    changed = {name: on_cuda(v) for name, v in fields.items() if isinstance(v, torch.Tensor)}
    if layout.bounds is not None:
        offsets = on_cuda(layout.bounds.offsets_tensor)
        changed["bounds"] = dataclasses.replace(layout.bounds, offsets_tensor=offsets)
    return dataclasses.replace(layout, **changed)


def build(case):
    """Built without memory, then given that of the device."""
    config = getattr(transformers, case["kind"])(**case["config"])
    dtype = torch.float32 if case["world"] else torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        model.tie_weights()
        if case["lora"]:
            actor = LoraActor(model, TrainConfig(lora_rank=16, bf16=True))
            actor.fuse_head(None)
        else:
            actor = Actor(model, fused_linear_logprob=True)
    if case["checkpointing"]:
        actor.gradient_checkpointing_enable()
    if case["packed"]:
        actor.pack_samples()
    return actor.train()


def give_memory(actor):
    moved = {}
    for module in actor.modules():
        for name, value in module._parameters.items():
            if value is not None and id(value) not in moved:
                moved[id(value)] = torch.nn.Parameter(on_cuda(value), value.requires_grad)
            module._parameters[name] = None if value is None else moved[id(value)]
        for name, value in module._buffers.items():
            module._buffers[name] = None if value is None else on_cuda(value)
    for module in actor.modules():  # the head holds the embedding's parameter where they are tied
        assert all(p is None or p.is_cuda for p in module._parameters.values())


def mesh_of(world_size):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    return init_device_mesh("cuda", (world_size,), mesh_dim_names=("shard",))


def shard(actor, mesh):
    from lightrft.strategy.fsdp2.sharding import ShardingPlan, apply_units

    apply_units(actor, ShardingPlan(mesh, torch.device("cuda"), torch.float32, torch.bfloat16))


def loss_of(output, layout):
    mask = on_cuda(layout.attention_mask).bool()
    if mask.shape != output.logprobs.shape:
        mask = torch.ones_like(output.logprobs, dtype=torch.bool)
    old, advantages = (torch.empty_like(output.logprobs.detach()) for _ in range(2))
    found = clipped_policy_loss(output.logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.2)
    return aggregate(found.loss, mask, "token-mean", torch.ones((), device="cuda"))


def trace(case):
    gc.collect()  # what the case before this one left
    others = live_bytes.LiveBytes("cuda").total
    layout, num_scored = fake_layout(case)
    kept = 0
    actor = build(case)
    mesh = mesh_of(case["world"]) if case["world"] else None  # it looks at values
    with FakeTensorMode():
        give_memory(actor)
        live = live_bytes.LiveBytes("cuda")
        with live:
            if mesh is not None:
                shard(actor, mesh)
            layout = to_fake(layout)
            actor.layout_policy = Given(packs_samples=case["packed"], layout=layout)
            trained = [p for p in actor.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, fused=True)
            for _ in range(2):  # Adam's states exist in the second step
                optimizer.zero_grad()
                live.begin()
                before = live.total
                for index in range(case["micro_batches"]):
                    output = actor(layout.input_ids, layout.attention_mask)
                    kept = kept if index else live.total - before
                    loss_of(output, layout).backward()
                    del output
                peak = live.peak - before
                optimizer.step()
    return {
        "kept": kept,
        "peak": peak,
        "resting": before - others,
        "foreign": sorted(live.foreign),
        "scored": num_scored,
        "largest": {str(k): n for k, n in live.largest.items() if k > 1e7},
    }


if __name__ == "__main__":
    torch.cuda.init()  # not in the middle of a checkpointed block
    print(json.dumps([trace(case) for case in json.loads(sys.argv[1])]))

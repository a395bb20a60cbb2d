"""Uneven rows, packed and padded, through models that have more than attention, or sinks in it.

OMP_NUM_THREADS=1 uv run pytest benchmarks/test_bench_hybrids.py -s
"""

from __future__ import annotations

import functools

import harness
import pytest
import torch

BUDGET_SECONDS = 20.0
VOCABULARY, LENGTHS = 8000, (400, 220, 150, 90, 60, 40, 30, 20)
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
}
HEADS = dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 4)
WIDTHS = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64)
MODELS = {
    "qwen3_5_text": {**HEADS, **WIDTHS},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256},
}


def make_actor(model_type: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightrft.models import Actor
    from lightrft.models.proof import pack_rows, prove_model
    from lightrft.strategy import get_fake_strategy

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SHAPE, **MODELS[model_type]})
    actor = Actor(AutoModelForCausalLM.from_config(config))
    pack_rows(prove_model(actor, get_fake_strategy({}).context, is_random=False))
    return actor.train()


def gradients(actor, batch, *, is_packed: bool) -> torch.Tensor:
    actor.pack_samples(is_packed)
    actor.zero_grad()
    actor(*batch).logprobs.sum().backward()
    return torch.cat([p.grad.flatten() for p in actor.parameters() if p.grad is not None])


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_and_padded_rows(benchmark, model_type):
    device, length = torch.device("cpu"), max(LENGTHS)
    token_ids = torch.randint(5, VOCABULARY, (len(LENGTHS), length))
    batch = token_ids, torch.arange(length) < torch.tensor(LENGTHS)[:, None]
    actor = make_actor(model_type)
    ways = {"padded": False, "packed": True}
    runs = {w: functools.partial(gradients, actor, batch, is_packed=p) for w, p in ways.items()}
    padded, packed = (run() for run in runs.values())
    assert (packed - padded).norm() < 1e-4 * padded.norm()
    timings = harness.interleave(runs, device, BUDGET_SECONDS)
    table = {name: timing.median for name, timing in timings.items()}
    share = 1 - sum(LENGTHS) / len(LENGTHS) / length
    print(
        f"\n{model_type}: padded {table['padded']:.2f} s, packed {table['packed']:.2f} s, "
        f"x{table['padded'] / table['packed']:.2f}; {share:.0%} of the padded tokens are padding"
    )
    benchmark.extra_info.update(seconds=table, padding=share)
    benchmark.pedantic(runs["packed"], rounds=1, iterations=1)

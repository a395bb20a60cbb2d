"""Processor time of a training step on two threads against one: what a thread costs by size.

    GOMP_SPINCOUNT=100 uv run pytest benchmarks/test_bench_threads.py -s

`lightrft train` decides by the product of a feed-forward layer over a micro-batch
(`lightrft.run.threads`). Spinning is off, as in `lightrft train`: threads that wait
give up their processor, and what remains is the work of sharing. Minimum of seven interleaved
rounds; processor time, since other work on the machine changes wall time most.
"""

from __future__ import annotations

import os
import resource

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3Config

from lightrft.run.threads import FLOPS_PER_THREAD

NUM_ROUNDS, SEQ, VOCAB = 7, 48, 512
# Hidden size, rows of a micro-batch.
SIZES = ((96, 32), (96, 128), (256, 32), (256, 128), (576, 32))


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def step(model: torch.nn.Module, token_ids: torch.Tensor) -> None:
    logits = model(input_ids=token_ids, use_cache=False).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten()).backward()
    model.zero_grad()


@pytest.mark.parametrize("hidden, rows", SIZES)
def test_two_threads_against_one(hidden, rows, benchmark):
    if os.environ.get("GOMP_SPINCOUNT") != "100":
        pytest.skip("start it with GOMP_SPINCOUNT=100, as lightrft train does")
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        head_dim=32,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        num_hidden_layers=2,
        intermediate_size=hidden * 8 // 3 // 32 * 32,
        max_position_embeddings=1024,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    token_ids = torch.randint(0, VOCAB, (rows, SEQ))
    flops = 2 * rows * SEQ * hidden * config.intermediate_size
    earlier = torch.get_num_threads()
    seconds: dict[int, list[float]] = {1: [], 2: []}
    try:
        for _ in range(NUM_ROUNDS + 1):
            for num_threads, found in seconds.items():
                torch.set_num_threads(num_threads)
                begin = processor_seconds()
                step(model, token_ids)
                found.append(processor_seconds() - begin)
        one, two = (min(found[1:]) for found in seconds.values())
        torch.set_num_threads(1)
        benchmark.pedantic(step, args=(model, token_ids), rounds=1)
    finally:
        torch.set_num_threads(earlier)
    worth = max(1, int(flops // FLOPS_PER_THREAD))
    benchmark.extra_info.update(gflop=flops / 1e9, one=one, two=two, ratio=two / one, worth=worth)
    print(
        f"\nhidden {hidden}, {rows} rows: product {flops / 1e9:.2f} GFLOP, one thread "
        f"{one:.3f} s, two {two:.3f} s, ratio {two / one:.2f}; the rule gives {worth}"
    )
    assert two < 4 * one

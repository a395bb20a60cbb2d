"""Passes of training and of the engine over the samples of a prompt: the prompt once, and for each.

OMP_NUM_THREADS=1 uv run pytest benchmarks/test_bench_shared_prefix.py -s --timeout 3600

Both sides take turns, on one thread; those of training are packed. CPU seconds are the measure, as
other programs may share the machine. `SHARED_PREFIX_LAYERS` (30) and `SHARED_PREFIX_ROUNDS` (3) may
be fewer.
"""

from __future__ import annotations

import functools
import os
import statistics
import time

import harness
import pytest
import torch

LAYERS = int(os.environ.get("SHARED_PREFIX_LAYERS", "30"))
ROUNDS = int(os.environ.get("SHARED_PREFIX_ROUNDS", "3"))
GROUP = 8
# Tokens of the prompt and of each response.
SIZES = {
    "P = R": (64, 64),
    "P = 4 R": (256, 64),
    "P = 4 R, longer": (1024, 256),
    "P = R / 8": (16, 128),
}


@functools.cache
def make_actor():
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightrft.models import Actor

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    actor = Actor(LlamaForCausalLM(config), fused_linear_logprob=True)
    actor.pack_samples()
    return actor.train()


def passes(min_shared_tokens, token_ids, scored, weights, *, is_compared=False):
    """An update's forward and backward pass, with the loss inside the head as in training.

    Returns the gradient if it is compared.
    """
    actor = make_actor()
    actor.share_prefixes(min_shared_tokens)

    def loss(logprobs, entropy, rows, columns) -> torch.Tensor:
        return (logprobs * weights[rows, columns]).sum()

    real = torch.ones_like(scored)
    actor(token_ids, real, scored_mask=scored, token_loss=loss).loss.backward()
    gradients = (p.grad.flatten() for p in actor.parameters())
    gradient = torch.cat(list(gradients)) if is_compared else None
    # A peak counts what a pass allocates, and would count what the last one left as freed.
    actor.zero_grad()
    return gradient


def cpu_seconds(run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


@pytest.mark.parametrize("name", SIZES)
def test_prompts_once_beside_once_a_sample(benchmark, name):
    from lightrft.models.shared_prefix import MIN_SHARED_TOKENS

    prompt, response = SIZES[name]
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randint, 5, 49152, generator=generator)
    first = draw((1, prompt)).expand(GROUP, prompt)
    token_ids = torch.cat([first, draw((GROUP, response))], dim=1)
    scored = (torch.arange(prompt + response) >= prompt).expand_as(token_ids)
    weights = torch.randn(token_ids.shape, generator=generator)
    runs = {
        way: functools.partial(passes, least, token_ids, scored, weights)
        for way, least in (("once a sample", None), ("once", MIN_SHARED_TOKENS))
    }
    separate, shared = (run(is_compared=True) for run in runs.values())
    error = float((shared - separate).norm() / separate.norm())
    assert error < 1e-5  # the rounding of 30 layers
    del separate, shared
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(ROUNDS):
        for way, run in runs.items():
            seconds[way].append(cpu_seconds(run))
    times = {way: statistics.median(each) for way, each in seconds.items()}
    peaks = {way: harness.peak_bytes(run, torch.device("cpu")) for way, run in runs.items()}
    (slow, fast), (large, small) = times.values(), peaks.values()
    tokens = GROUP * (prompt + response) / (prompt + GROUP * response)
    print(
        f"\n{name} ({prompt}, {response} tokens), {GROUP} samples, {LAYERS} layers: "
        f"{slow:.2f} s against {fast:.2f} s, x{slow / fast:.2f} (tokens x{tokens:.2f}); peak "
        f"{large / 2**20:.0f} MiB against {small / 2**20:.0f}; gradients differ by {error:.1e}"
    )
    benchmark.extra_info.update(seconds=times, peaks=peaks, ratio=slow / fast, tokens=tokens)
    benchmark.pedantic(runs["once"], rounds=1, iterations=1)


def test_the_engine_runs_a_prompt_once_for_its_samples(benchmark):
    from lightrft.engines import EngineConfig, SamplingParams
    from lightrft.engines.hf.engine import HFEngine
    from lightrft.engines.types import GenerationRequest

    engine = HFEngine(EngineConfig("hf", ""), module=make_actor().model.eval())
    ids = torch.randint(5, 49152, (GROUP, 256), generator=torch.Generator().manual_seed(1))
    requests = [GenerationRequest(tuple(row), number) for number, row in enumerate(ids.tolist())]
    runs = {
        "samples of one prompt": (requests[:1], GROUP),
        "as many prompts": (requests, 1),
    }
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    for is_measured in [False] + [True] * ROUNDS:
        for way, (prompts, samples) in runs.items():
            params = SamplingParams(max_tokens=2, n=samples)
            used = cpu_seconds(functools.partial(engine.generate, prompts, params))
            seconds[way] += [used] * is_measured
    one, many = (statistics.median(each) for each in seconds.values())
    print(
        f"\nengine, 256 tokens, {GROUP} samples, {LAYERS} layers: {one:.2f} s for one prompt, "
        f"{many:.2f} s for as many prompts, x{many / one:.2f}"
    )
    benchmark.extra_info.update(seconds={"one": one, "many": many}, ratio=many / one)
    prompts, samples = runs["samples of one prompt"]
    params = SamplingParams(max_tokens=2, n=samples)
    benchmark.pedantic(engine.generate, args=(prompts, params), rounds=1, iterations=1)

"""A whole actor step with the plain head, the fused head, and the loss inside the head.

    OMP_NUM_THREADS=1 uv run pytest benchmarks/test_bench_actor_step.py -s

The head is a part of a step, so what it gains is less here than in test_bench_linear_logprob.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import harness
import pytest
import torch

BUDGET_SECONDS = 10.0
TIMED_SHAPE = (4, 96)  # rows, longest row
MEMORY_SHAPE = (12, 512)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a micro-batch; the first quarter of each row is the prompt."""

    token_ids: torch.Tensor
    attention_mask: torch.Tensor
    scored_mask: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor


def make_actor(device: torch.device, *, is_fused: bool):
    """Widths and vocabulary of a 135M model, with 6 of its 30 layers; random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightrft.models.actor import Actor

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    actor = Actor(LlamaForCausalLM(config).to(device), fused_linear_logprob=is_fused)
    # As for any batch whose memory matters: else the activations of the trunk are most of it.
    actor.gradient_checkpointing_enable()
    return actor.train()


def make_batch(device: torch.device, shape: tuple[int, int]) -> Batch:
    generator = torch.Generator().manual_seed(1)
    num_rows, length = shape
    token_ids = torch.randint(0, 49152, shape, generator=generator)
    lengths = torch.randint(length // 2, length + 1, (num_rows, 1), generator=generator)
    attention_mask = torch.arange(length) < lengths
    scored_mask = attention_mask & (torch.arange(length) >= length // 4)
    noise = torch.randn(shape, generator=generator)
    tensors = (token_ids, attention_mask, scored_mask, -10.8 + 0.05 * noise, noise.sign() * 0.7)
    return Batch(*(t.to(device) for t in tensors))


def clipped_loss(logprobs, old_logprobs, advantages, num_tokens):
    ratio = torch.exp(logprobs - old_logprobs)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -gain.sum() / num_tokens


def loss_after(actor, batch: Batch) -> torch.Tensor:
    logprobs = actor(batch.token_ids, batch.attention_mask, scored_mask=batch.scored_mask).logprobs
    kept = batch.scored_mask
    return clipped_loss(
        logprobs[kept], batch.old_logprobs[kept], batch.advantages[kept], kept.sum()
    )


def loss_inside(actor, batch: Batch) -> torch.Tensor:
    num_tokens = batch.scored_mask.sum()

    def token_loss(logprobs, entropy, rows, columns):
        old_logprobs, advantages = (
            batch.old_logprobs[rows, columns],
            batch.advantages[rows, columns],
        )
        return clipped_loss(logprobs, old_logprobs, advantages, num_tokens)

    return actor(
        batch.token_ids, batch.attention_mask, scored_mask=batch.scored_mask, token_loss=token_loss
    ).loss


def step(actor, optimizer, loss_function, batch: Batch) -> float:
    loss = loss_function(actor, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def gradients(actor, loss_function, batch: Batch) -> None:
    """Forward and backward pass: the optimizer's own memory is the same whatever the head is."""
    loss_function(actor, batch).backward()
    actor.zero_grad()


def test_actor_step(benchmark, device):
    batch, large_batch = make_batch(device, TIMED_SHAPE), make_batch(device, MEMORY_SHAPE)
    ways = {
        "plain head": (False, loss_after),
        "fused head": (True, loss_after),
        "loss inside the head": (True, loss_inside),
    }
    runs, peaks, norms = {}, {}, {}
    for name, (is_fused, loss_function) in ways.items():
        actor = make_actor(device, is_fused=is_fused)
        optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-6)
        runs[name] = functools.partial(step, actor, optimizer, loss_function, batch)
        norms[name] = runs[name]()  # also allocates the optimizer's state
        one_pass = functools.partial(gradients, actor, loss_function, large_batch)
        peaks[name] = harness.peak_bytes(one_pass, device) / 2**20
    timings = harness.interleave(runs, device, BUDGET_SECONDS)
    table = {
        name: {
            "seconds": timing.median,
            "p10_p90": timing.spread,
            "peak_mib": peaks[name],
            "grad_norm": norms[name],
        }
        for name, timing in timings.items()
    }
    plain = table["plain head"]
    print(f"\n{harness.device_name(device)}, whole actor step: {TIMED_SHAPE} rows, tokens timed,")
    print(f"memory of one forward and backward pass over {MEMORY_SHAPE}")
    for name, row in table.items():
        print(
            f"  {name:<22} {row['seconds'] * 1e3:9.1f} ms  x{row['seconds'] / plain['seconds']:.2f}"
            f"  peak {row['peak_mib']:6.0f} MiB  x{row['peak_mib'] / plain['peak_mib']:.2f}"
        )
    benchmark.extra_info.update(providers=table, timed_shape=TIMED_SHAPE, memory_shape=MEMORY_SHAPE)
    benchmark.pedantic(runs["fused head"], rounds=1, iterations=1)
    if device.type == "cpu":
        # The gradients of the tied weight, once as head and once as embedding, are half of what is
        # left, whatever the head is.
        assert table["loss inside the head"]["peak_mib"] <= plain["peak_mib"] / 3
        assert table["loss inside the head"]["seconds"] <= 1.5 * plain["seconds"]
    for name in ways:
        assert norms[name] == pytest.approx(norms["plain head"], rel=1e-4)

"""The output layer and the weight buckets at 7B, beside their floors and beside others.

    python3 benchmarks/gpu/kernels.py head|buckets

A line is written for each provider of a mode once the mode was measured, providers in turns.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import lines
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import logprob_peers
import test_bench_linear_logprob as head_bench
import test_bench_weight_buckets as bucket_bench

from lightrft.kernels import hash_tensors, linear_logprob, linear_policy_loss

SHAPE, TINY_SHAPE = (8192, 3584, 152_064), (64, 64, 2048)
BUDGET_SECONDS, TINY_SECONDS = 2.0, 0.05
BUCKET_BYTES = 256 * 2**20
PEERS = {"trl": logprob_peers._trl, "liger": logprob_peers._liger}


def measured(
    mode: str, runs: dict[str, Callable[[], object]], device: torch.device
) -> dict[str, harness.Timing]:
    """Return the timings of all providers that run; others are named with their fault."""
    for name in list(runs):
        try:
            runs[name]()
        # Whatever fault a peer's compiler or launch has: it is named.
        except Exception as error:  # noqa: BLE001
            text = f"{mode}: {type(error).__name__}: {str(error)[:120]}"
            lines.add("absent", name, text=text)
            del runs[name]
    return harness.interleave(
        runs, device, TINY_SECONDS if lines.is_rehearsal() else BUDGET_SECONDS
    )


def providers(device: torch.device) -> dict[str, Callable[..., torch.Tensor]]:
    """Return functions of (hidden, weight, targets) that return logprobs."""
    if device.type == "cuda":
        functions = head_bench.our_providers(device)
    else:
        functions = {"ours products": functools.partial(head_bench.ours, "chunked")}
    functions["naive"] = logprob_peers.naive
    for name, make in PEERS.items():
        if name == "liger" and device.type != "cuda":
            lines.add("absent", name, text="it needs a GPU")
            continue
        try:
            functions[name] = make()
        except (ImportError, AttributeError) as error:
            lines.add("absent", name, text=f"{error}: carry benchmarks/gpu/wheels")
    return functions


def inside(inputs: tuple[torch.Tensor, ...], old: torch.Tensor) -> object:
    """Return the gradients of a clipped policy loss that is computed inside the output layer."""
    hidden, weight, targets, advantages = inputs

    def token_loss(logprobs, entropy, rows):
        leaf = logprobs.detach().requires_grad_()
        ratio = torch.exp(leaf - old[rows])
        gain = torch.minimum(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows])
        loss = -gain.sum() / len(old)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0], None

    leaves = (hidden.detach().requires_grad_(), weight.detach().requires_grad_())
    return torch.autograd.grad(linear_policy_loss(*leaves, targets, token_loss).loss, leaves)


def head(device: torch.device) -> None:
    """Measure logprobs, and logprobs with gradients."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = head_bench.make_inputs(TINY_SHAPE if lines.is_rehearsal() else SHAPE, device, dtype)
    functions = providers(device)
    with torch.no_grad():
        old = linear_logprob(*inputs[:3]).logprobs
    for mode in ("both", "forward"):
        runs = {
            name: functools.partial(head_bench.step, f, inputs, mode)
            for name, f in functions.items()
        }
        runs["floor"] = functools.partial(head_bench.floor, inputs, mode)
        if mode == "both":
            runs["loss inside"] = functools.partial(inside, inputs, old)
        for name, timing in measured(mode, runs, device).items():
            values = {"peak_mib": harness.peak_bytes(runs[name], device) / 2**20}
            if name in functions:
                values["max_error"], _ = head_bench.largest_error(functions[name], inputs)
            lines.add("head", name, mode=mode, seconds=timing.median, **values)


def buckets(device: torch.device) -> None:
    """Measure packing with and without a cast, unpacking and hashing; bytes read and written."""
    count = 4 if device.type == "cuda" else 2
    for source, out in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
        packed = bucket_bench.make_buckets(device, source, out, BUCKET_BYTES)
        sources = [tensor for tensors, _, _ in packed for tensor in tensors]
        numel = sum(tensor.numel() for tensor in sources)
        moved = numel * (source.itemsize + out.itemsize)
        half = torch.ones(moved // 16, dtype=torch.int64, device=device)
        target = torch.empty_like(half)
        is_cast = source != out
        runs = {
            "one copy": functools.partial(target.copy_, half),
            "pack with cast" if is_cast else "pack": functools.partial(
                bucket_bench.pack_all, packed, out
            ),
        }
        read = dict.fromkeys(runs, moved)
        if not is_cast:
            outs = [[torch.empty_like(t) for t in tensors] for tensors, _, _ in packed]
            runs["unpack"] = functools.partial(bucket_bench.unpack_all, packed, outs)
            runs["hash"] = functools.partial(hash_tensors, sources)
            runs["_foreach_copy_"] = functools.partial(bucket_bench.foreach_copy, packed, out)
            host = torch.empty(
                len(half) // count, dtype=half.dtype, pin_memory=device.type == "cuda"
            )
            runs["to the host"] = functools.partial(host.copy_, half[: len(host)])
            read |= {"unpack": moved, "hash": numel * out.itemsize, "_foreach_copy_": moved}
            read["to the host"] = host.nbytes
        for name, timing in measured("buckets", runs, device).items():
            lines.add("buckets", name, gb_per_second=read[name] / timing.median / 1e9)
        del packed, sources, half, target, runs


if __name__ == "__main__":
    chosen = {"head": head, "buckets": buckets}[sys.argv[1]]
    chosen(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

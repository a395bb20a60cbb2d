"""Timed checks of a GPU for `lightrft doctor --gpu`, to judge a new machine.

Each check has a limit. Without a GPU nothing is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightrft.tools.doctor.check import Check, CheckResult, checked

GIGABYTE = 1e9
ROUNDS = 7
DEADLINE_SECONDS = 300.0
MIN_PRODUCT_TFLOPS = 30.0
MIN_COPY_GB_PER_SECOND = 200.0
MIN_PACK_GB_PER_SECOND = 20.0
MIN_HEAD_SHARE = 0.25
# Largest difference from the float64 result of a bfloat16 one, over the largest value.
MAX_HEAD_ERROR = 1e-3


def gpu_checks() -> list[Check]:
    """Return the checks, kernels first."""
    remedy = (
        "compare `nvidia-smi -q` (clocks, power cap, ECC, other programs) with the vendor's data"
    )
    kernels = "send this line with `lightrft doctor`; --no_fused_linear_logprob does without it"
    steps: tuple[tuple[str, str, str, Callable[[], CheckResult]], ...] = (
        ("bf16 product", f">= {MIN_PRODUCT_TFLOPS:g} TFLOP/s", remedy, time_product),
        ("device copy", f">= {MIN_COPY_GB_PER_SECOND:g} GB/s", remedy, time_copy),
        (
            "head",
            f"error <= {MAX_HEAD_ERROR:g} and >= {MIN_HEAD_SHARE:g} of the product's rate",
            kernels,
            time_head,
        ),
        (
            "weight buckets",
            f"same bits as on the host, >= {MIN_PACK_GB_PER_SECOND:g} GB/s",
            "build lightrft-kernels with nvcc",
            time_buckets,
        ),
    )
    return [
        Check(name, limit, remedy, step, DEADLINE_SECONDS, needs_gpu=True)
        for name, limit, remedy, step in steps
    ]


def seconds_of(step: Callable[[], object]) -> float:
    """Return the median duration on the device, after one call to warm up."""
    step()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times)[ROUNDS // 2]


def product_rate() -> float:
    """Return the FLOP/s of a product of bfloat16 matrices."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right)


def time_product() -> CheckResult:
    """Time a product, with whose rate others are compared."""
    rate = product_rate() / 1e12
    return checked(rate >= MIN_PRODUCT_TFLOPS, f"{rate:.0f} TFLOP/s")


def time_copy() -> CheckResult:
    """Time a copy on the device, by read and written bytes."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * source.numel() / seconds_of(lambda: target.copy_(source)) / GIGABYTE
    return checked(rate >= MIN_COPY_GB_PER_SECOND, f"{rate:.0f} GB/s")


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((value.double() - expected).abs().max() / expected.abs().max())


def time_head() -> CheckResult:
    """Time log-probabilities with gradients, in the default way of this machine."""
    tokens, hidden, vocab = 4096, 2048, 65536
    error = head_error("cuda", torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(0)
    states, weight = (
        torch.randn(rows, hidden, generator=generator, device="cuda").mul_(hidden**-0.25)
        for rows in (tokens, vocab)
    )
    states, weight = (x.to(torch.bfloat16).requires_grad_() for x in (states, weight))
    targets = torch.arange(tokens, device="cuda")
    seconds = seconds_of(lambda: head_step(states, weight, targets))
    rate = 6 * tokens * hidden * vocab / seconds
    share = rate / product_rate()
    text = f"{rate / 1e12:.0f} TFLOP/s, {share:.0%} of the product's, error {error:.1e}"
    return checked(error <= MAX_HEAD_ERROR and share >= MIN_HEAD_SHARE, text)


def head_step(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Run forward and backward pass; return the log-probabilities."""
    from lightrft.kernels import linear_logprob

    states.grad = weight.grad = None
    logprobs = linear_logprob(states, weight, targets).logprobs
    logprobs.sum().backward()
    return logprobs.detach()


def head_error(device: str, dtype: torch.dtype) -> float:
    """Return the error of log-probabilities, against float64 on the same numbers."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(64, 128, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(1000, 128, generator=generator) / 11).to(device, dtype).requires_grad_()
    targets = torch.arange(64, device=device)
    logits = states.detach().double() @ weight.detach().double().T
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    return relative_error(head_step(states, weight, targets), expected)


def time_buckets() -> CheckResult:
    """Time packing of float32 into bfloat16, and compare hashes with the host's."""
    from lightrft.kernels import hash_tensor, pack

    source = torch.randn(2**28, device="cuda")
    out = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    seconds = seconds_of(lambda: pack([source], out, [0], [torch.bfloat16]))
    rate = source.numel() * 4 / seconds / GIGABYTE
    part = source[: 2**20]
    same = hash_tensor(part) == hash_tensor(part.cpu())
    bits = "same bits" if same else "other bits than on the host"
    return checked(same and rate >= MIN_PACK_GB_PER_SECOND, f"{rate:.0f} GB/s, {bits}")

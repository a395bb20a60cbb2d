"""Torch's attention kernel for sequences of unequal lengths, and the trial that decides on it.

Neither a version nor a signature tells whether the kernel computes what packing needs. So it is
called once on the device, with grouped heads and a few tokens, forward and backward, and compared
with plain attention. A process tries each shape once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from lightrft.kernels.names import first_line
from lightrft.models.shared_prefix import offsets_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HALF_DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
# FlashAttention 3 in torch: from the package flash-attn-3, on compute capability 9.0.
NEWER = "FA3"
# Settings of a trial: lengths of the sequences, heads of queries and of keys, and windows.
LENGTHS, HEADS, KV_HEADS, WINDOWS = [5, 40, 1, 18], 4, 2, (None, 7)
# Keys before the first query of each sequence.
PREFIXES = [9, 0, 33, 6]
# A correct kernel is at most this much further from float64 than plain attention.
MAX_ERROR_RATIO = 2.0
# Queries, keys and values of one stream: [tokens, heads, head_dim] each.
Stream = tuple[Tensor, Tensor, Tensor]
# Borders of sequences: [sequences + 1] int32, first token of each, then the number of tokens; and
# the tokens of the longest.
Borders = tuple[Tensor, int]
Attend = Callable[[Stream, int | None], Tensor]


class KernelShape(NamedTuple):
    """Kind of attention that a trial decides on.

    Args:
        device_type: Type of the device, such as "cuda".
        dtype: Dtype of queries, keys and values.
        head_dim, value_dim: Sizes of the heads of queries and keys, and of values.
        has_prefixes: Sequences have keys before those of their queries.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    has_prefixes: bool = False

    @staticmethod
    def of_model(config: PretrainedConfig, device_type: str, *, bf16: bool) -> KernelShape:
        """Return the shape of a model's text part, in bfloat16 or float32."""
        text = config.get_text_config()
        values = text.to_dict()
        size = values.get("head_dim") or text.hidden_size // text.num_attention_heads
        dtype = torch.bfloat16 if bf16 else torch.float32
        sizes = (values.get("qk_head_dim") or size, values.get("v_head_dim") or size)
        return KernelShape(device_type, dtype, *sizes)


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """Result of a trial.

    Args:
        works: Whether all sequences can go through one kernel.
        finding: Name of the kernel and its error, or the reason why there is none.
    """

    works: bool
    finding: str

    @property
    def packing(self) -> str:
        """Way in which packed rows pass through attention, and why."""
        way = "one kernel for all rows" if self.works else "one call for each row"
        return f"{way}: {self.finding}"


known_trials: dict[KernelShape, KernelTrial] = {}


def try_kernel(shape: KernelShape) -> KernelTrial:
    """Return whether one kernel takes all sequences of a stream; the first call tries it."""
    if shape not in known_trials:
        known_trials[shape] = run_trial(shape)
    return known_trials[shape]


def use_newer_kernel(shapes: Iterable[KernelShape]) -> None:
    """Turn FlashAttention 3 on for this process, if it passes the trial for all shapes.

    Otherwise torch's built-in kernel stays, or is put back. The switch affects all of torch's fused
    attention, so calls for single rows are tried, too.
    """
    wanted = set(shapes)
    # If torch's kernel fails, there is nothing to improve on.
    is_needed = wanted and all(try_kernel(shape).works for shape in wanted)
    if not is_needed or current_flash_attention_impl() is not None:
        return
    trials = {}
    # The package may be absent, or built for another torch.
    with suppress(Exception):
        activate_flash_attention_impl(NEWER)
        trials = {shape: run_trial(shape) for shape in wanted}
    if trials and all(trial.works for trial in trials.values()):
        known_trials.update(trials)
    else:
        use_own_kernel()


def use_own_kernel() -> None:
    """Put torch's built-in kernel back, if another one was turned on."""
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
        known_trials.clear()


def kernel_hindrance(shape: KernelShape) -> str | None:
    """Return why no kernel of FlashAttention can exist, before any trial; None if one can."""
    if shape.device_type != "cuda":
        return f"FlashAttention's kernel is for GPUs, not for {shape.device_type}"
    if shape.dtype not in HALF_DTYPES:
        return f"FlashAttention's kernel computes in half precision, not {shape.dtype}"
    if torch.cuda.get_device_capability() < (8, 0):
        return "FlashAttention's kernel needs compute capability 8.0"
    if max(shape.head_dim, shape.value_dim) > MAX_HEAD_DIM:
        return f"FlashAttention's kernel takes heads up to {MAX_HEAD_DIM} numbers"
    return None


def attend_varlen(
    stream: Stream, borders: Borders, keys: Borders, *, scale: float | None, window: int | None
) -> Tensor:
    """Attend causally inside each sequence by one kernel: [tokens, heads, value_dim].

    Args:
        stream: Queries, keys and values.
        borders, keys: Borders of the queries, and of the keys, which end with those of the queries.
        scale: Factor of the products; None is torch's.
        window: Number of last tokens that a token sees, itself included; None is all.
    """
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x.contiguous() for x in stream)
    kernel: Callable[..., object] = varlen_attn
    # The kernel of torch 2.11 lacks the argument, and handles grouped heads without it.
    grouping = (
        {"enable_gqa": query.shape[1] != key.shape[1]}
        if "enable_gqa" in _parameters_of(kernel)
        else {}
    )
    attended = kernel(
        query,
        key,
        value,
        borders[0],
        keys[0],
        borders[1],
        keys[1],
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **grouping,
    )
    assert isinstance(attended, Tensor)  # a pair only on request
    return attended


@functools.cache
def _parameters_of(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def run_trial(shape: KernelShape) -> KernelTrial:
    """Run the kernel of a shape in this process and compare it with torch."""
    hindrance = kernel_hindrance(shape)
    if hindrance is not None:
        return KernelTrial(False, hindrance)
    newer = current_flash_attention_impl()
    name = "varlen_attn" if newer is None else f"varlen_attn of {newer}"
    try:
        with torch.enable_grad():
            error, limit = _largest_error(shape, with_rows=newer is not None)
    except Exception as failure:  # noqa: BLE001 - kernels report what they lack in any way
        reason = f"{type(failure).__name__}: {first_line(failure)}"
        return KernelTrial(False, f"{name} fails with grouped heads: {reason}")
    errors = f"error {error:.1e}, at most {limit:.1e} is rounding"
    if not error <= limit:  # written so that NaN fails
        return KernelTrial(False, f"{name} computes others than plain attention: {errors}")
    return KernelTrial(True, f"{name}, tried here with {errors}")


def _largest_error(shape: KernelShape, *, with_rows: bool) -> tuple[float, float]:
    """Return error and limit of the result or gradient nearest to its limit, or beyond it."""
    prefixes = PREFIXES if shape.has_prefixes else [0] * len(LENGTHS)
    num_keys = [sum(pair) for pair in zip(prefixes, LENGTHS, strict=True)]
    queries, keys = (_borders(lengths, shape.device_type) for lengths in (LENGTHS, num_keys))
    generator = torch.Generator().manual_seed(0)
    sizes = [(sum(LENGTHS), HEADS, shape.head_dim), (sum(num_keys), KV_HEADS, shape.head_dim)]
    sizes.append((sum(num_keys), KV_HEADS, shape.value_dim))
    sizes.append((sum(LENGTHS), HEADS, shape.value_dim))  # size of the result's gradient
    *stream, upstream = (
        torch.randn(*size, generator=generator).to(shape.device_type, shape.dtype) for size in sizes
    )

    def by_kernel(parts: Stream, window: int | None) -> Tensor:
        return attend_varlen(parts, queries, keys, scale=None, window=window)

    def one_by_one(parts: Stream, window: int | None) -> Tensor:
        return _one_by_one(parts, num_keys, window)

    def results(attend: Attend, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in stream]
        attended = attend((leaves[0], leaves[1], leaves[2]), window)
        gradients = torch.autograd.grad(attended, leaves, upstream.to(dtype))
        return [x.detach().double() for x in (attended, *gradients)]

    def plain(parts: Stream, window: int | None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return one_by_one(parts, window)

    pairs = []
    for window in WINDOWS:
        exact = results(plain, window, torch.float64)
        near = results(plain, window, shape.dtype)
        ways = [by_kernel, *([one_by_one] if with_rows else [])]
        for values in (results(way, window, shape.dtype) for way in ways):
            for value, rounded, expected in zip(values, near, exact, strict=True):
                limit = MAX_ERROR_RATIO * _error(rounded, expected) + torch.finfo(shape.dtype).eps
                pairs.append((_error(value, expected), limit))
    return max(pairs, key=lambda pair: pair[0] / pair[1] if pair[0] == pair[0] else torch.inf)


def _borders(lengths: list[int], device_type: str) -> Borders:
    return offsets_of(lengths, torch.device(device_type))[1], max(lengths)


def _one_by_one(stream: Stream, num_keys: list[int], window: int | None) -> Tensor:
    """Run torch's attention on each sequence of `LENGTHS`, with its keys, separately."""
    sizes = (LENGTHS, num_keys, num_keys)
    parts = [
        torch.split(x.transpose(0, 1).unsqueeze(0), size, dim=2)
        for x, size in zip(stream, sizes, strict=True)
    ]
    attended = []
    for query, key, value in zip(*parts, strict=True):
        mask, num_before = None, key.shape[2] - query.shape[2]
        if window is not None or num_before:
            index = torch.arange(key.shape[2], device=query.device)
            distance = index[num_before:, None] - index[None, :]
            mask = (distance >= 0) & (distance < (window or len(index)))
        attended.append(
            F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        )
    return torch.cat(attended, dim=2)[0].transpose(0, 1)


def _error(value: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((value - expected).abs().max() / expected.abs().max())

"""Matrix products that accumulate in float32 whatever the dtype of their inputs is."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """The product left @ right in float32 (float64 for float64 inputs), never rounded to less."""
    if _runs_on_tensor_cores(left, right):
        return torch.mm(left, right, out_dtype=torch.float32)
    dtype = _wide_dtype(left, right)
    return left.to(dtype) @ right.to(dtype)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`; `total` is float32 (float64 for float64 inputs)."""
    if _runs_on_tensor_cores(left, right) and total.dtype == torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        return
    # Summed apart and then added: a library may add term by term to what is already there.
    total += left.to(total.dtype) @ right.to(total.dtype)


def write_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Sets `out` to left @ right, accumulated in float32 and rounded once to the dtype of `out`."""
    if _runs_on_tensor_cores(left, right) and out.dtype == left.dtype:
        torch.mm(left, right, out=out)
        return
    out.copy_(wide_product(left, right))


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Sets `out` to left @ right, all of one wide dtype; no memory is allocated."""
    torch.mm(left, right, out=out)


def accumulate_into(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, all of one wide dtype; no memory is allocated."""
    torch.addmm(total, left, right, out=total)


@cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 numbers and sums float32, and torch lets it.

    Asks for the instructions (AMX or AVX512-BF16) and tries: products of bfloat16 operands must
    be as exact as those of float32.
    """
    if not torch.backends.mkldnn.is_available() or not _has_bfloat16_instructions():
        return False
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(shape, generator=generator).bfloat16().float() for shape in ((64, 256), (256, 96))
    )
    with rounds_to_bfloat16(True):
        found = left @ right
    # Sums of 256 terms of size 1; a sum in bfloat16 would be off by 0.1.
    return float((found.double() - left.double() @ right.double()).abs().max()) < 1e-4


@contextmanager
def rounds_to_bfloat16(is_on: bool) -> Iterator[None]:
    """Within, torch may round float32 operands of a CPU's products to bfloat16.

    Torch has no such choice for one call: it holds for the whole process, so whatever enters this
    computes nothing else, and waits for nothing.
    """
    if not is_on:
        yield
        return
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _has_bfloat16_instructions() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@contextmanager
def full_precision_reductions() -> Iterator[None]:
    """Split products are summed in float32: by default cuBLAS may sum their parts in 16 bits."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    before_half = settings.allow_fp16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    settings.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = before
        settings.allow_fp16_reduced_precision_reduction = before_half


def _runs_on_tensor_cores(left: Tensor, right: Tensor) -> bool:
    return left.is_cuda and left.dtype in _HALVES and left.dtype == right.dtype


def _wide_dtype(left: Tensor, right: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (left.dtype, right.dtype) else torch.float32

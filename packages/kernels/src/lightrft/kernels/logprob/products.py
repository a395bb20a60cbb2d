"""Matrix products that accumulate in float32 whatever the dtype of their inputs is."""

from collections.abc import Iterator
from contextlib import contextmanager

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

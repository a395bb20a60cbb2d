"""Matrix products that accumulate in float32 for any dtype of inputs."""

import torch
from torch import Tensor


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32 (float64 for float64 inputs), never rounded to less.

    This holds for any setting of `torch.set_float32_matmul_precision`, which is not changed.
    """
    if _runs_on_tensor_cores(left, right):
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.is_cuda and {left.dtype, right.dtype} == {torch.bfloat16, torch.float32}:
        return split_product(left, right)
    dtype = _wide_dtype(left, right)
    left, right = left.to(dtype), right.to(dtype)
    if dtype == torch.float64 or not may_round_operands(left.device):
        return left @ right
    if left.is_cuda:
        return product_of_parts(left, right)
    return (left.double() @ right.double()).to(dtype)


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Set `out` to left @ right, all of one wide dtype, without allocations if torch is exact."""
    if _may_round(left):
        out.copy_(wide_product(left, right))
    else:
        torch.mm(left, right, out=out)


def accumulate_into(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, all of one wide dtype; see `product_into`."""
    if _may_round(left):
        total += wide_product(left, right)
    else:
        torch.addmm(total, left, right, out=total)


def _may_round(operand: Tensor) -> bool:
    return operand.dtype == torch.float32 and may_round_operands(operand.device)


def split_product(left: Tensor, right: Tensor, *, num_parts: int = 3) -> Tensor:
    """Multiply a bfloat16 and a float32 matrix in float32, the latter as a sum of bfloat16 parts.

    Each part rounds the remainder of the previous parts; three hold all 24 digits of a float32
    number. Each part costs one bfloat16 product. On GPUs with tensor cores, float32 products are
    about 15 times slower.
    """
    is_left = left.dtype == torch.float32
    total, rest = None, left if is_left else right
    for _ in range(num_parts):
        part = rest.to(torch.bfloat16)
        rest = rest - part.float()
        product = wide_product(part, right) if is_left else wide_product(left, part)
        total = product if total is None else total.add_(product)
    if total is None:
        raise ValueError(f"num_parts must be at least 1: got {num_parts}")
    return total


def may_round_operands(device: torch.device) -> bool:
    """Return whether the device may round float32 operands of a product to fewer digits."""
    return _operand_precision(device) not in ("ieee", "none")


def _operand_precision(device: torch.device) -> str:
    settings = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return str(settings.matmul.fp32_precision)


def product_of_parts(left: Tensor, right: Tensor) -> Tensor:
    """Compute left @ right in float32 from three products with heads that TF32 does not round.

    x = head + rest with 11 digits in the head and at most 13 in the rest. The digits that TF32
    drops of the rest, and the product of the rests, are below 2^-21 of the result's terms.
    """
    left_head, right_head = _head(left), _head(right)
    small = (left - left_head) @ right_head + left_head @ (right - right_head)
    return left_head @ right_head + small


def _head(x: Tensor) -> Tensor:
    """Return float32 numbers with the lowest 13 of their 24 digits set to zero."""
    return (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, which is float32 (float64 for float64 inputs)."""
    if _runs_on_tensor_cores(left, right) and total.dtype == torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        # Summed separately and then added: a library may add term by term to the total.
        total += wide_product(left, right)


def write_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Set `out` to left @ right, summed in float32 and rounded once to its dtype."""
    # cuBLAS may sum the parts of a split product in bfloat16 if the setting allows it. The setting
    # is global, so it cannot change for one operation: other threads compute at the same time.
    may_round = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    if _runs_on_tensor_cores(left, right) and not may_round and out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(wide_product(left, right))


def _runs_on_tensor_cores(left: Tensor, right: Tensor) -> bool:
    return left.is_cuda and left.dtype == right.dtype == torch.bfloat16


def _wide_dtype(left: Tensor, right: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (left.dtype, right.dtype) else torch.float32

"""Sequence parallelism by exchange of heads.

Every rank holds a slice of the token stream; for attention it gets all tokens of some heads.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509, sec. 3.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from lightrft.models.types import LayoutRefusedError


class _AllToAll(torch.autograd.Function):
    """Exchange where block r of the first dimension goes to rank r; it equals its transpose."""

    @staticmethod
    def forward(ctx: FunctionCtx, blocks: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, blocks.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        group: ProcessGroup = ctx.group  # type: ignore[attr-defined]
        return _AllToAll.apply(gradients[0], group), None  # type: ignore[no-untyped-call, unused-ignore]


class _SumOverRanks(torch.autograd.Function):
    """Sum of the ranks' values; the gradient goes to each of them unchanged."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, group: ProcessGroup) -> Tensor:
        del ctx
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0], None


def sum_over_ranks(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over a sequence-parallel group, so that all ranks compute the same loss.

    Each rank's gradient is that of its terms. Summed over the group, the parameters' gradients are
    the gradient of one loss, not of one loss per rank.

    Args:
        values: Values, of equal shape on all ranks of the group.
        group: Ranks that share a sequence.
    """
    total: Tensor = _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call, unused-ignore]
    return total


def check_head_counts(num_heads: int, sp_size: int) -> None:
    """Raise LayoutRefusedError unless the query heads can be distributed evenly over the ranks."""
    if num_heads % sp_size:
        legal = [size for size in range(1, num_heads + 1) if num_heads % size == 0]
        raise LayoutRefusedError(
            f"sp_size must divide the number of attention heads: got sp_size {sp_size} and "
            f"{num_heads} heads; legal values: {legal}"
        )


def gather_sequence(
    query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all tokens of this rank's share of the heads, by one exchange.

    If there are fewer key heads than ranks, they are repeated, so that each rank gets the key heads
    of its query heads.

    Args:
        query: [1, heads, tokens / ranks, head_dim].
        key, value: [1, kv_heads, tokens / ranks, head_dim].
        group: Ranks that share a sequence; their number divides `heads`.

    Returns:
        [1, heads / ranks, tokens, head_dim], and twice [1, kv_heads', tokens, head_dim].
    """
    size = dist.get_world_size(group)
    check_head_counts(query.shape[1], size)
    num_copies = size // math.gcd(key.shape[1], size)
    key, value = (x.repeat_interleave(num_copies, dim=1) for x in (key, value))
    # [ranks, heads of one rank, tokens / ranks, head_dim]
    parts = [x[0].reshape(size, -1, *x.shape[2:]) for x in (query, key, value)]
    counts = [part.shape[1] for part in parts]
    blocks: Tensor = _AllToAll.apply(torch.cat(parts, dim=1), group)  # type: ignore[no-untyped-call, unused-ignore]
    whole = blocks.transpose(0, 1).flatten(1, 2).unsqueeze(0)  # ranks and tokens become tokens
    query, key, value = torch.split(whole, counts, dim=1)
    return query, key, value


def scatter_sequence(attended: Tensor, group: ProcessGroup) -> Tensor:
    """Return this slice of all heads: [1, heads / ranks, tokens, dim] to [1, heads, slice, dim]."""
    size = dist.get_world_size(group)
    heads = attended.shape[1]
    blocks = attended.reshape(heads, size, -1, attended.shape[-1]).transpose(0, 1)
    received: Tensor = _AllToAll.apply(blocks, group)  # type: ignore[no-untyped-call, unused-ignore]
    return received.flatten(0, 1).unsqueeze(0)

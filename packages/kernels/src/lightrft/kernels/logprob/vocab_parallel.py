"""A vocabulary split over ranks: one all-gather forward, one all-reduce backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightrft.kernels.logprob.rows import RowStatistics

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.kernels.logprob.types import VocabShard

try:
    from torch.distributed import all_gather_single as _all_gather
except ImportError:  # torch < 2.13
    from torch.distributed import all_gather_into_tensor as _all_gather


def merge_over_ranks(rows: RowStatistics, group: dist.ProcessGroup | None) -> RowStatistics:
    """Statistics of the whole vocabulary from every rank's part, merged in the order of ranks.

    Args:
        rows: This rank's part; all four statistics travel in one all-gather.
        group: The ranks.
    """
    part = torch.stack((rows.maximum, rows.exp_sum, rows.weighted_sum, rows.target_logits))
    world_size = dist.get_world_size(group)
    parts = part.new_empty((world_size, *part.shape))
    _all_gather(parts.view(-1), part.view(-1), group=group)
    merged = RowStatistics(*parts[0].unbind())
    for other in parts[1:]:
        merged = merged.merge(RowStatistics(*other.unbind()))
    return merged


def sum_over_ranks_(gradient: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums dL/dhidden over the ranks, in place."""
    dist.all_reduce(gradient, group=group)


def local_rows(weight: Tensor, shard: VocabShard) -> int:
    """Rows of this rank's weight that are tokens and not padding."""
    return max(0, min(len(weight), shard.vocab_size - shard.start))

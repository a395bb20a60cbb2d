"""Parameters of a sharded model against whole ones, each rank comparing what it holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, local_rank_in

SMALLEST_TENSOR = 1e-4
"""Tensors below this share of the whole norm are judged with the whole only."""


def local_values(source: ParameterSource) -> dict[str, Tensor]:
    """Copies of this rank's shards in float32, by checkpoint name."""
    return {
        entry.checkpoint_name: entry.local_shard.detach().float().clone()
        for entry in source.parameters()
    }


def deviation(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    source: ParameterSource,
    strategy: StrategyBase,
) -> tuple[float, float]:
    """||found - expected|| / ||expected||, over all parameters and for the worst one. Collective.

    Args:
        found: This rank's flat shard of each parameter.
        expected: Whole parameters, of any shape; the same on every rank.
        source: Says which range of a parameter this rank holds.
        strategy: Sums over ranks.
    """
    rank = local_rank_in(source.group)
    sizes, sums = [], []
    for entry in source.parameters():
        start, stop = entry.shards[rank] if entry.is_sharded else (0, entry.numel)
        own = expected[entry.checkpoint_name].flatten()[start:stop].to(entry.local_shard.device)
        difference = found[entry.checkpoint_name] - own
        squares = [difference.double().square().sum(), own.double().square().sum()]
        sizes.append(entry.numel)
        sums.append(torch.stack([*squares, squares[0].new_tensor(float(own.numel()))]).cpu())
    total = strategy.all_reduce(torch.stack(sums), "sum")  # [parameters, 3]
    # Ranks that hold the same values are counted once.
    copies = total[:, 2] / torch.tensor(sizes, dtype=torch.float64).clamp(min=1)
    differences, norms = (total[:, 0] / copies).sqrt(), (total[:, 1] / copies).sqrt()
    whole = float(torch.linalg.vector_norm(norms))
    deviation_of_all = float(torch.linalg.vector_norm(differences)) / whole
    is_judged = norms > SMALLEST_TENSOR * whole
    return deviation_of_all, float((differences / norms)[is_judged].max())

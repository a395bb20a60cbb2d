"""Exponential moving averages of weights, shard by shard."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightrft.strategy.weight_sync.parameter_source import ParameterSource


class MovingAverages:
    """Averages of any number of models, kept in float32 whatever the averaged model stores.

    With beta near 1 a step moves the average by less than half a bfloat16 unit, so an average
    that is stored in bfloat16 gets a float32 master, from which it is rounded.
    """

    def __init__(self) -> None:
        self._masters: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = (
            weakref.WeakKeyDictionary()
        )

    @torch.no_grad()
    def update(self, model: ParameterSource, average: ParameterSource, *, beta: float) -> None:
        """Average <- beta * average + (1 - beta) * model, for every parameter.

        Args:
            model: Parameters of the trained model.
            average: Parameters of the average, sharded like the model's; written in place.
            beta: Weight of the past, in [0, 1].

        Raises:
            ValueError: The two have other parameters or shards.
        """
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"beta must be in [0, 1]: got {beta}")
        values = {entry.checkpoint_name: entry for entry in model.parameters()}
        targets = {entry.checkpoint_name: entry for entry in average.parameters()}
        odd = [
            name
            for name in sorted(values.keys() | targets.keys())
            if name not in values
            or name not in targets
            or values[name].shape != targets[name].shape
            or values[name].shards != targets[name].shards
        ]
        if odd:
            raise ValueError(
                "a model and its moving average must have the same parameters, sharded alike: "
                f"{len(odd)} differ, e.g. {odd[:3]}; prepare both with the same shard_size"
            )
        masters = self._masters.setdefault(average.owner, {})
        for name, target in targets.items():
            shard = target.local_shard
            master = shard
            if shard.dtype != torch.float32:
                if name not in masters:
                    masters[name] = shard.float()
                master = masters[name]
            master.lerp_(values[name].local_shard.to(master.device, torch.float32), 1.0 - beta)
            if master is not shard:
                shard.copy_(master)

    def values(self, average: ParameterSource) -> dict[str, Tensor]:
        """This rank's shards of an average as they are averaged: masters where there are some."""
        masters = self._masters.get(average.owner, {})
        return {
            entry.checkpoint_name: masters.get(entry.checkpoint_name, entry.local_shard)
            for entry in average.parameters()
        }

    @torch.no_grad()
    def restore(self, average: ParameterSource, values: Mapping[str, Tensor]) -> None:
        """Set an average to what `values` returned, masters included."""
        masters: dict[str, Tensor] = {}
        for entry in average.parameters():
            value = values[entry.checkpoint_name]
            entry.local_shard.copy_(value)
            if entry.local_shard.dtype != torch.float32 and value.dtype == torch.float32:
                masters[entry.checkpoint_name] = value.to(entry.local_shard.device)
        self._masters[average.owner] = masters

    def forget(self, module: nn.Module) -> None:
        """Drop the masters of an average whose weights were read from a file."""
        self._masters.pop(module, None)

"""Exponential moving averages of weights, shard by shard."""

import weakref
from pathlib import Path

import torch
from torch import Tensor, nn

from lightrft.strategy.checkpoints.files import FileWriter
from lightrft.strategy.checkpoints.shard_files import Shard, ShardReader, write_shards
from lightrft.strategy.distributed.process_end import CheckpointError
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, local_rank_in

FOLDER = "average"


class MovingAverages:
    """Averages of any number of models, kept in float32 whatever the averaged model stores.

    With beta near 1 a step moves the average by less than half a bfloat16 unit. So an average that
    is stored in bfloat16 gets a float32 master, from which it is rounded.
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
        layouts = [
            {(name, entry.shape, entry.shards) for name, entry in entries.items()}
            for entries in (values, targets)
        ]
        odd = sorted({name for name, _, _ in layouts[0] ^ layouts[1]})
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

    def save(self, folder: Path, average: ParameterSource, files: FileWriter, *, rank: int) -> None:
        """Write this rank's ranges of an average into a checkpoint, with masters if there are any.

        Values that every rank holds are written by the first.
        """
        masters = self._masters.get(average.owner, {})
        shards = {}
        for entry in average.parameters():
            start, stop = entry.range_on(local_rank_in(average.group))
            if start < stop and (rank == 0 or entry.is_sharded):
                name = entry.checkpoint_name
                shards[name] = Shard(masters.get(name, entry.local_shard), start, entry.shape)
        write_shards(folder / FOLDER, shards, files, rank=rank)

    @torch.no_grad()
    def load(self, folder: Path, average: ParameterSource) -> None:
        """Set an average to a saved one, masters included, from any number of ranks.

        Raises:
            CheckpointError: The checkpoint has no average, or one of another model.
        """
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} holds no moving average: it was saved by a run without one; continue "
                "without it, or start a new run"
            )
        reader = ShardReader(folder / FOLDER)
        masters: dict[str, Tensor] = {}
        for entry in average.parameters():
            start, stop = entry.range_on(local_rank_in(average.group))
            if start == stop:
                continue
            name, shard = entry.checkpoint_name, entry.local_shard
            value = torch.empty(stop - start, dtype=reader.dtype_of(name))
            reader.read_into(name, value, start, stop, entry.shape)
            shard.copy_(value)
            if shard.dtype != torch.float32 and value.dtype == torch.float32:
                masters[name] = value.to(shard.device)
        self._masters[average.owner] = masters

    def forget(self, module: nn.Module) -> None:
        """Drop the masters of an average whose weights were read from a file."""
        self._masters.pop(module, None)

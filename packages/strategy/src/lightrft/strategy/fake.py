"""A single process that really trains, without any process group."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.strategy.backend import Backend, WantedState
from lightrft.strategy.checkpoints.file_writers import FileWriter
from lightrft.strategy.checkpoints.gathered_model import WeightFiles, as_saved, check_names
from lightrft.strategy.checkpoints.manifest import Checkpoint
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.distributed.collectives import ALONE
from lightrft.strategy.distributed.process_groups import resolve_shard_size
from lightrft.strategy.distributed.sequence_parallel import share_sequences
from lightrft.strategy.prepared import AnyModel, Arguments, PreparedModel, inner_module
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    module_parameter_source,
    tied_parameter_names,
)

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"


class PlainBackend(Backend):
    """Plain torch; every rank trains a whole model of its own."""

    def prepare_model(
        self,
        model: nn.Module,
        *,
        is_training: bool,
        shard_size: int = -1,
        reshard_after_forward: bool = True,
    ) -> nn.Module:
        """Moves the model to the device; parameters in training stay float32."""
        del reshard_after_forward
        resolve_shard_size(shard_size, self.ranks.world_size)
        share_sequences(model, self.ranks.sp_group, is_trained=is_training)
        model = model.to(self.ranks.device)
        uses_bf16 = self.ranks.compute_dtype == torch.bfloat16
        if not is_training:
            model = model.eval().requires_grad_(False)
            return model.to(torch.bfloat16) if uses_bf16 else model
        if uses_bf16 and "forward" not in vars(model):
            autocast = torch.autocast(self.ranks.device.type, dtype=torch.bfloat16)
            model.forward = autocast(model.forward)
        return model

    def prepare_training(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> PreparedModel:
        """Moves the model to the device."""
        return PreparedModel(self.prepare_model(model, is_training=True), optimizer, scheduler)

    def parameter_source(self, model: AnyModel) -> ParameterSource:
        """Every parameter, whole."""
        return module_parameter_source(inner_module(model))

    def write_state(self, folder: Path, found: PreparedModel, files: FileWriter) -> None:
        """One file each for model, optimizer and schedule."""
        files.tensors(folder / MODEL_FILE, inner_module(found).state_dict())
        if found.optimizer is not None:
            files.pickled(folder / OPTIMIZER_FILE, found.optimizer.state_dict())
        if found.scheduler is not None:
            files.pickled(folder / SCHEDULER_FILE, found.scheduler.state_dict())

    def read_state(self, checkpoint: Checkpoint, found: PreparedModel, wanted: WantedState) -> None:
        """Reads those files; absent ones that are wanted are an error."""
        folder = checkpoint.path
        tensors = load_file(folder / MODEL_FILE)
        inner_module(found).load_state_dict(tensors, strict=wanted.strict)
        for is_wanted, file, target in (
            (wanted.optimizer, OPTIMIZER_FILE, found.optimizer),
            (wanted.scheduler, SCHEDULER_FILE, found.scheduler),
        ):
            if is_wanted and target is not None:
                if not (folder / file).is_file():
                    raise FileNotFoundError(
                        f"{folder} has no {file}: it was saved without; load it with "
                        "load_module_only=True"
                    )
                target.load_state_dict(torch.load(folder / file, weights_only=True))

    def gather_weights(
        self, module: nn.Module, dtype: torch.dtype, *, keeps: bool
    ) -> dict[str, Tensor]:
        """Copies on the host; tied parameters once."""
        tied = tied_parameter_names(module) if keeps else {}
        return {
            name: as_saved(value, dtype)
            for name, value in module.state_dict().items()
            if keeps and name not in tied
        }

    def load_weights(self, module: nn.Module, path: Path, *, strict: bool) -> None:
        """Copies full weights into the model."""
        files = WeightFiles(path, module)
        state = module.state_dict()
        names, note = check_names(set(state), files.names, source=str(path), strict=strict)
        if note is not None:
            self.ranks.print(f"warning: {note}")
        for name in names:
            target = state[name]
            target.copy_(files.rows(name, 0, target.shape[0] if target.dim() else 0))


class FakeStrategy(StrategyBase):
    """The whole interface in one process: for tests, for debugging, for one small device.

    Collectives are those of a single rank, whatever torch.distributed says. Nothing is faked in
    training: losses are differentiated, gradients clipped, AdamW steps.

    Args:
        seed, max_norm, micro_train_batch_size, train_batch_size, args: See `StrategyBase`.
    """

    world_group = ALONE

    def __init__(
        self,
        seed: int = 42,
        max_norm: float = 1.0,
        micro_train_batch_size: int = 1,
        train_batch_size: int = 1,
        args: Arguments | None = None,
    ) -> None:
        super().__init__(
            seed,
            max_norm,
            micro_train_batch_size,
            train_batch_size,
            args,
            backend=PlainBackend,
        )


def get_fake_strategy(args: Arguments | None = None) -> FakeStrategy:
    """A strategy for one process, without torchrun and without a process group.

    Args:
        args: A Namespace, mapping or StrategyConfig; None takes every default, and one sample per
            optimizer step.
    """
    if args is None:
        return FakeStrategy()
    config = StrategyConfig.from_args(args)
    return FakeStrategy(
        config.seed,
        config.max_norm,
        config.micro_train_batch_size,
        config.train_batch_size,
        args,
    )

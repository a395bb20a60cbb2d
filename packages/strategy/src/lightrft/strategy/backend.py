"""What a training backend does for a strategy: placing models, gradients, states as files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.strategy.checkpoints.file_writers import FileWriter
from lightrft.strategy.checkpoints.manifest import Checkpoint
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.optimizers import (
    AdamSettings,
    clip_gradients,
    gradient_norm,
    optimizer_parameters,
    parameter_groups,
)
from lightrft.strategy.prepared import AnyModel, PreparedModel, wrapped_module
from lightrft.strategy.weight_sync.parameter_source import ParameterSource


@dataclass(frozen=True, slots=True)
class WantedState:
    """What a load reads besides the weights.

    Args:
        strict: Missing or unexpected weights are errors.
        optimizer, scheduler, rng: Read those, or the states of the random generators, too.
    """

    strict: bool
    optimizer: bool
    scheduler: bool
    rng: bool


class Backend(ABC):
    """The part of a strategy that differs between FSDP2, DeepSpeed and a single process.

    Methods that are not abstract do what plain torch does in one process.

    Args:
        ranks: Not started yet.
        config: Of the strategy.
    """

    wraps_before_optimizer = False
    """Whether a model must be wrapped before its optimizer is created (sharded parameters)."""
    builds_on_meta = False
    """Whether `init_model_context(meta_init=True)` has an effect."""
    offloads_adam = False
    """Whether Adam's states live on the CPU."""

    def __init__(self, ranks: DistributedContext, config: StrategyConfig) -> None:
        self.ranks = ranks
        self.config = config

    def start(self) -> None:  # noqa: B027 - a backend may have nothing to start
        """Called once the ranks have started."""

    def stop(self) -> None:  # noqa: B027 - likewise
        """Called before the process group ends."""

    @abstractmethod
    def prepare_model(
        self,
        model: nn.Module,
        *,
        is_training: bool,
        shard_size: int = -1,
        reshard_after_forward: bool = True,
    ) -> nn.Module:
        """See `StrategyBase.prepare_model`."""

    @abstractmethod
    def prepare_training(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> PreparedModel:
        """Makes one model and its optimizer ready for `backward` and `step`."""

    def create_optimizer(self, module: nn.Module, settings: AdamSettings) -> Optimizer:
        """AdamW; biases and norm gains are not decayed."""
        is_fused = self.ranks.has_gpu and not self.offloads_adam
        return torch.optim.AdamW(
            parameter_groups(module.named_parameters(), settings.weight_decay),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True if is_fused else None,
        )

    def check_trainable(self, model: AnyModel) -> None:  # noqa: B027 - plain torch trains any
        """Raises a TypeError unless this backend prepared the model for training."""

    def backward(self, loss: Tensor, model: AnyModel, *, is_last: bool) -> None:
        """Adds the gradients of a loss that is scaled already.

        Args:
            loss: Scalar.
            model: As prepared.
            is_last: The optimizer acts after this micro-batch.
        """
        del model, is_last
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, model: AnyModel) -> float:
        """Clips and updates, unless gradients are not finite on some rank; clears gradients.

        Returns:
            The global norm before clipping, equal on all ranks; not finite if nothing was changed.
        """
        del model
        parameters = optimizer_parameters(optimizer)
        norm = gradient_norm(parameters)
        if torch.isfinite(norm):
            clip_gradients(parameters, norm, self.config.max_norm)
            optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    def discard_gradients(self, optimizer: Optimizer) -> None:
        """Drops the gradients of an optimizer step that was given up."""
        optimizer.zero_grad()

    @abstractmethod
    def parameter_source(self, model: AnyModel) -> ParameterSource:
        """See `StrategyBase.parameter_source`."""

    @abstractmethod
    def gather_weights(
        self, module: nn.Module, dtype: torch.dtype, *, keeps: bool
    ) -> dict[str, Tensor]:
        """Full CPU values by name, tied ones once. Collective.

        Args:
            module: The module inside the wrapper.
            dtype: Of the floating point values returned.
            keeps: Whether this rank wants them; the others return {}.
        """

    @abstractmethod
    def load_weights(self, module: nn.Module, path: Path, *, strict: bool) -> None:
        """Reads full weights in safetensors format."""

    @property
    def checkpoint_details(self) -> Mapping[str, int | str]:
        """What must be the same in a run that loads a checkpoint of this one."""
        return {}

    @abstractmethod
    def write_state(self, folder: Path, found: PreparedModel, files: FileWriter) -> None:
        """Writes this rank's part of model, optimizer and schedule. May be collective."""

    @abstractmethod
    def read_state(self, checkpoint: Checkpoint, found: PreparedModel, wanted: WantedState) -> None:
        """Reads what `write_state` wrote. May be collective."""

    def offload_optimizer(self, optimizer: Optimizer) -> None:  # noqa: B027 - nothing to move
        """See `StrategyBase.maybe_offload_optimizer`."""

    def load_optimizer(self, optimizer: Optimizer, device: torch.device | None) -> None:  # noqa: B027
        """See `StrategyBase.maybe_load_optimizer`."""

    def move_model(self, model: AnyModel, device: torch.device) -> nn.Module:
        """Moves an idle model, or back."""
        return wrapped_module(model).to(device)

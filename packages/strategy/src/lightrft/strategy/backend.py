"""Training backends: models they prepare, placing, gradients, states as files."""

import math
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config import BackendOptions, StrategyConfig, TrainingOptions
from lightrft.strategy.checkpoints import training_state
from lightrft.strategy.checkpoints.files import FileWriter
from lightrft.strategy.checkpoints.manifest import Checkpoint
from lightrft.strategy.checkpoints.shard_files import full_value
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.meta_init import parameters_on_meta
from lightrft.strategy.optimizers import (
    AdamSettings,
    ParameterGroup,
    clip_gradients,
    gradient_norm,
    optimizer_parameters,
    parameter_groups,
    with_rate_factors,
)
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, local_rows


class PreparedModel(NamedTuple):
    """A model ready for training, with its optimizer and schedule; None means "no such model"."""

    model: nn.Module | None
    optimizer: Optimizer | None
    scheduler: LRScheduler | None

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the model's forward pass."""
        return wrapped_module(self)(*args, **kwargs)


NO_ENGINE = "Inference engine is not initialized."
NO_MODEL = PreparedModel(None, None, None)
AnyModel = nn.Module | PreparedModel
ModelOptimPair = tuple[nn.Module, Optimizer]
ModelOrModelOptimPair = nn.Module | ModelOptimPair
RewardModels = nn.Module | Sequence[nn.Module] | None
Arguments = Namespace | Mapping[str, object] | StrategyConfig


@runtime_checkable
class _Wrapper(Protocol):
    """DistributedDataParallel, a DeepSpeed engine and the like."""

    module: nn.Module


def wrapped_module(model: AnyModel) -> nn.Module:
    """Return the callable module of a model or PreparedModel, including a backend's wrapper.

    Raises:
        ValueError: The PreparedModel is empty.
    """
    module = model.model if isinstance(model, PreparedModel) else model
    if module is None:
        raise ValueError("this PreparedModel has no model")
    return module


def inner_module(model: AnyModel) -> nn.Module:
    """Return the actor, critic or bare model inside a wrapper with a `module` attribute."""
    module = wrapped_module(model)
    return module.module if isinstance(module, _Wrapper) else module


def is_actor(model: object) -> bool:
    """Return whether the model is marked as an actor (`is_actor = True`)."""
    return bool(getattr(model, "is_actor", False))


def is_engine(model: object) -> bool:
    """Return whether the object is a rollout engine."""
    # Imported here, so that a run without an engine never loads it.
    from lightrft.engines.base import RolloutEngine

    return isinstance(model, RolloutEngine)


def published_sizes(config: TrainingOptions) -> tuple[int, float, int, int]:
    """Return the arguments that every strategy's constructor begins with."""
    return config.seed, config.max_norm, config.micro_train_batch_size, config.train_batch_size


@dataclass(frozen=True, slots=True)
class WantedState:
    """States that a load reads besides the weights.

    Args:
        strict: Treat missing or unexpected weights as errors.
        optimizer, scheduler, rng: Also read these; `rng` is the state of the random generators.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    rng: bool = True


class Backend(ABC):
    """The part of a strategy that differs between FSDP2, DeepSpeed and a single process.

    Methods that are not abstract work as plain torch does in one process.

    Args:
        context: Context that has not started yet.
        config: Options of the strategy.
    """

    name: ClassVar[str]
    # Whether a model must be wrapped before its optimizer is created (sharded parameters).
    wraps_before_optimizer = False
    # Whether `init_model_context(meta_init=True)` has an effect.
    builds_on_meta = False

    def __init__(self, context: DistributedContext, config: BackendOptions) -> None:
        self.context = context
        self.config = config

    def start(self) -> None:  # noqa: B027 - a backend may have nothing to start
        """Start what the backend needs, once the ranks have started."""

    def check_model_size(self, num_elements: int) -> None:  # noqa: B027 - no bound
        """Raise a ValueError, before loading, for a model too large for the backend."""

    def stop(self) -> None:  # noqa: B027 - likewise
        """Clean up before the process group ends."""

    @contextmanager
    def init_model_context(self, meta_init: bool | None = False) -> Iterator[None]:
        """Implement `StrategyBase.init_model_context`."""
        if meta_init and not self.builds_on_meta:
            self.context.print("warning: option without effect: meta_init acts only with fsdp")
        try:
            with parameters_on_meta(bool(meta_init) and self.builds_on_meta):
                yield
        finally:
            self.context.note_memory("Finished init_model_context")

    @abstractmethod
    def prepare_model(
        self,
        model: nn.Module,
        *,
        is_training: bool = False,
        shard_size: int = -1,
        reshard: bool = True,
    ) -> nn.Module:
        """Implement `StrategyBase.prepare_model`."""

    @abstractmethod
    def prepare_training(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> PreparedModel:
        """Prepare one model and its optimizer for `backward` and `step`."""

    def create_optimizer(self, module: nn.Module, settings: AdamSettings) -> Optimizer:
        """Create AdamW; biases and norm gains are not decayed."""
        if self.config.adam_8bit:
            from lightrft.strategy.adam_8bit import Adam8bit

            return Adam8bit(self.parameter_groups(module, settings), settings)
        return torch.optim.AdamW(
            self.parameter_groups(module, settings),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,  # on a CPU, too: offloaded states would take ten times as long
        )

    def parameter_groups(
        self, module: nn.Module, settings: AdamSettings
    ) -> Sequence[ParameterGroup]:
        """Return the trained parameters by decay and by learning rate."""
        groups = parameter_groups(module.named_parameters(), settings.weight_decay)
        factors = self.config.rate_factors
        return with_rate_factors(groups, module.named_parameters(), settings.lr, factors)

    def check_trainable(self, model: AnyModel) -> None:  # noqa: B027 - plain torch trains any
        """Raise a TypeError unless this backend prepared the model for training."""

    def backward(self, loss: Tensor, model: AnyModel, *, is_last: bool) -> None:
        """Add the gradients of an already scaled loss.

        Args:
            loss: Scalar.
            model: Prepared model.
            is_last: Whether the optimizer steps after this micro-batch.
        """
        del model, is_last
        loss.backward()

    def step(self, optimizer: Optimizer, model: AnyModel) -> float:
        """Clip and update, unless gradients are not finite on some rank; clear gradients.

        Returns:
            Global norm before clipping, equal on all ranks; not finite if nothing was changed.
        """
        del model
        self.load_optimizer(optimizer, None)
        parameters = optimizer_parameters(optimizer)
        norm = self.global_norm(parameters)
        if math.isfinite(norm):
            clip_gradients(parameters, norm, self.config.max_norm)
            optimizer.step()
        optimizer.zero_grad()
        return norm

    def global_norm(self, parameters: Iterable[Tensor]) -> float:
        """Return the norm of all gradients, the same on all ranks."""
        return gradient_norm(parameters)

    def discard_gradients(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an abandoned optimizer step."""
        optimizer.zero_grad()

    def local_part(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter."""
        return local_rows(parameter.detach())[0]

    @abstractmethod
    def parameter_source(self, model: AnyModel) -> ParameterSource:
        """Implement `StrategyBase.parameter_source`."""

    def full_values(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and saved buffers in full, one in flight at a time; tied ones once.

        Collective: every rank must consume all of them.

        Args:
            module: Module inside the wrapper.
        """
        for name, value in training_state.module_state(module).items():
            yield name, full_value(value)

    def full_states(self, found: PreparedModel) -> Iterator[tuple[str, Tensor]]:
        """Yield full parameters as `weight/NAME` and optimizer states as `KEY/NAME`, one by one.

        Collective: every rank must consume all of them.
        """
        module = inner_module(found)
        names = {name for name, _ in module.named_parameters()}
        for name, value in self.full_values(module):
            if name in names:
                yield f"weight/{name}", value
        if found.optimizer is not None:
            yield from training_state.full_optimizer_states(module, found.optimizer)

    def optimizer_groups(self, found: PreparedModel) -> list[dict[str, object]]:
        """Return names of the parameters, and numbers, of each group of the optimizer."""
        if found.optimizer is None:
            return []
        return training_state.group_names(inner_module(found), found.optimizer)

    def load_weights(self, module: nn.Module, path: Path, *, strict: bool) -> None:
        """Read full weights in safetensors format."""
        training_state.load_full_weights(path, module, strict=strict)

    @property
    def checkpoint_details(self) -> Mapping[str, int | str]:
        """Return facts that must match in a run that loads a checkpoint of this one."""
        return {}

    def write_state(self, folder: Path, found: PreparedModel, files: FileWriter) -> None:
        """Write this rank's part of model and optimizer. May be collective."""
        module, rank = inner_module(found), self.context.rank
        training_state.save_module(folder, module, files, rank=rank)
        if found.optimizer is not None:
            training_state.save_optimizer(folder, module, found.optimizer, files, rank=rank)

    def read_state(self, checkpoint: Checkpoint, found: PreparedModel, wanted: WantedState) -> None:
        """Read what `write_state` wrote, with any number of ranks. May be collective."""
        module = inner_module(found)
        training_state.load_module(checkpoint.path, module, strict=wanted.strict)
        if wanted.optimizer and found.optimizer is not None:
            self.load_optimizer(found.optimizer, None)
            training_state.load_optimizer(checkpoint.path, module, found.optimizer)

    def offload_optimizer(self, optimizer: Optimizer) -> None:  # noqa: B027 - nothing to move
        """Implement `StrategyBase.maybe_offload_optimizer`."""

    def load_optimizer(self, optimizer: Optimizer, device: torch.device | None) -> None:  # noqa: B027
        """Implement `StrategyBase.maybe_load_optimizer`."""

    def move_model(self, model: AnyModel, device: torch.device) -> nn.Module:
        """Move an idle model to a device."""
        return wrapped_module(model).to(device)

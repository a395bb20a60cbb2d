"""Arguments and results of `prepare`."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.engines.base import RolloutEngine
from lightrft.strategy.config import StrategyConfig


class PreparedModel(NamedTuple):
    """A model ready for training, with its optimizer and schedule; None means "no such model"."""

    model: nn.Module | None
    optimizer: Optimizer | None
    scheduler: LRScheduler | None

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The model's forward pass."""
        return wrapped_module(self)(*args, **kwargs)


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
    """The callable module of a model or PreparedModel, with whatever a backend put around it.

    Raises:
        ValueError: The PreparedModel is empty.
    """
    module = model.model if isinstance(model, PreparedModel) else model
    if module is None:
        raise ValueError("this PreparedModel has no model")
    return module


def inner_module(model: AnyModel) -> nn.Module:
    """The actor, critic or bare model inside a wrapper with a `module` attribute."""
    module = wrapped_module(model)
    return module.module if isinstance(module, _Wrapper) else module


def is_actor(model: object) -> bool:
    """Whether the model is marked as an actor (`is_actor = True`)."""
    return bool(getattr(model, "is_actor", False))


def is_engine(model: object) -> bool:
    """Whether the object is a rollout engine."""
    return isinstance(model, RolloutEngine)


def published_sizes(config: StrategyConfig) -> tuple[int, float, int, int]:
    """The arguments that every strategy's constructor begins with."""
    return config.seed, config.max_norm, config.micro_train_batch_size, config.train_batch_size

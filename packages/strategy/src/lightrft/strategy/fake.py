"""A single process that really trains, without any process group."""

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config import StrategyConfig
from lightrft.strategy.backend import (
    AnyModel,
    Arguments,
    Backend,
    PreparedModel,
    inner_module,
    published_sizes,
)
from lightrft.strategy.distributed.collectives import ALONE
from lightrft.strategy.distributed.process_groups import resolve_shard_size
from lightrft.strategy.distributed.sequence_parallel import share_sequences
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, module_parameter_source


class PlainBackend(Backend):
    """Plain torch; every rank trains a whole model."""

    name = "Fake"

    def prepare_model(
        self,
        model: nn.Module,
        *,
        is_training: bool = False,
        shard_size: int = -1,
        reshard: bool = True,
    ) -> nn.Module:
        """Move the model to the device; parameters in training stay float32."""
        del reshard
        resolve_shard_size(shard_size, self.context.world_size)
        share_sequences(model, self.context.sp_group, is_trained=is_training)
        model = model.to(self.context.device)
        uses_bf16 = self.context.computes_in_bf16
        if not is_training:
            model = model.eval().requires_grad_(False)
            return model.to(torch.bfloat16) if uses_bf16 else model
        if uses_bf16 and "forward" not in vars(model):
            autocast = torch.autocast(self.context.device.type, dtype=torch.bfloat16)
            model.forward = autocast(model.forward)
        return model

    def prepare_training(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> PreparedModel:
        """Move the model to the device."""
        return PreparedModel(self.prepare_model(model, is_training=True), optimizer, scheduler)

    def parameter_source(self, model: AnyModel) -> ParameterSource:
        """Return every parameter, whole."""
        return module_parameter_source(inner_module(model))


class FakeStrategy(StrategyBase):
    """The whole interface in one process: for tests, for debugging, for one small device.

    Collectives act on a single rank, whatever torch.distributed says. Nothing is faked in
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
        sizes = (seed, max_norm, micro_train_batch_size, train_batch_size)
        super().__init__(*sizes, args, backend=PlainBackend)


def get_fake_strategy(args: Arguments | None = None) -> FakeStrategy:
    """Return a strategy for one process, without torchrun and without a process group.

    Args:
        args: A Namespace, mapping or StrategyConfig; None takes every default, and one sample per
            optimizer step.
    """
    if args is None:
        return FakeStrategy()
    config = StrategyConfig.from_args(args)
    return FakeStrategy(*published_sizes(config), args)

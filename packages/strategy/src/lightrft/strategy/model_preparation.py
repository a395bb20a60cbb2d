"""From bare models and data to what a training loop uses."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightrft.strategy.checkpoints.moving_averages import MovingAverages
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.optimizers import learning_rate_schedule
from lightrft.strategy.prepared import NO_MODEL, PreparedModel, inner_module, wrapped_module
from lightrft.strategy.sampler import DistributedSampler
from lightrft.strategy.training_interface import TrainingInterface

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset, Sampler

from lightrft.strategy.prepared import AnyModel, Arguments, RewardModels

T = TypeVar("T")


class ModelPreparation(TrainingInterface):
    """Preparation of models, optimizers, schedules and loaders, the same for every backend."""

    wraps_before_optimizer = False
    """Whether a model must be wrapped before its optimizer is created (sharded parameters)."""
    builds_on_meta = False
    """Whether `init_model_context(meta_init=True)` has an effect."""

    def __init__(
        self,
        seed: int,
        max_norm: float,
        micro_train_batch_size: int,
        train_batch_size: int,
        args: Arguments | None = None,
    ) -> None:
        super().__init__(seed, max_norm, micro_train_batch_size, train_batch_size, args)
        self._trained: weakref.WeakKeyDictionary[
            nn.Module, tuple[Optimizer | None, LRScheduler | None]
        ] = weakref.WeakKeyDictionary()
        self._averages = MovingAverages()

    def prepare(
        self,
        *models_or_model_optim_pairs: object,
        is_rlhf: bool = False,
    ) -> object:
        """Makes models ready, each according to its form.

        A triple (model, optimizer, scheduler) becomes a PreparedModel and a pair a pair, ready for
        training; a list becomes a list of models for inference, a model one such model; None and
        a triple of None stay.

        Args:
            *models_or_model_optim_pairs: As above.
            is_rlhf: Reward models in a list are sharded over at most 8 ranks.

        Returns:
            A list in the order of the arguments; for one argument its result alone.
        """
        done = [self._prepare_one(item, is_rlhf=is_rlhf) for item in models_or_model_optim_pairs]
        return done[0] if len(done) == 1 else done

    def _prepare_one(self, item: object, *, is_rlhf: bool) -> object:
        if item is None:
            return None
        if isinstance(item, nn.Module):
            return self.prepare_model(item)
        if isinstance(item, tuple) and len(item) in (2, 3) and not isinstance(item[1], nn.Module):
            model, optimizer, scheduler = (*item, None)[:3]
            if model is None:
                return NO_MODEL
            ready = self._prepare_training(model, optimizer, scheduler)
            self._remember(ready)
            return ready if len(item) == 3 else (ready.model, ready.optimizer)
        if isinstance(item, list | tuple):
            size = 8 if is_rlhf else -1
            return [self.prepare_model(model, shard_size=size) for model in item]
        raise TypeError(
            "prepare takes models, (model, optimizer[, scheduler]) tuples and lists of models, got "
            f"{type(item).__name__}"
        )

    def _remember(self, ready: PreparedModel) -> None:
        """Keeps a model's optimizer and schedule for checkpoints, under every name it has."""
        if ready.model is not None:
            pair = (ready.optimizer, ready.scheduler)
            for module in {ready.model, self.unwrap_model(ready.model)}:
                self._trained[module] = pair

    def _resolve(
        self,
        model: AnyModel,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> PreparedModel:
        """The model with its optimizer and schedule: given, its own, or the remembered ones."""
        if isinstance(model, PreparedModel):
            found = model
        else:
            found = PreparedModel(model, *self._trained.get(model, (None, None)))
        return PreparedModel(
            found.model, optimizer or found.optimizer, scheduler or found.scheduler
        )

    def unwrap_model(self, model: AnyModel) -> nn.Module:
        """The actor, critic or bare model inside whatever the strategy put around it."""
        return inner_module(model)

    def _create_scheduler(
        self, optimizer: Optimizer, max_steps: int, config: StrategyConfig | None = None
    ) -> LRScheduler:
        config = config or self.config
        return learning_rate_schedule(
            config.lr_scheduler,
            optimizer,
            max_steps=max_steps,
            warmup_ratio=config.lr_warmup_ratio,
            min_lr_ratio=config.min_lr_ratio,
        )

    def _trainable(
        self, model: nn.Module, learning_rate: float, max_steps: int, config: StrategyConfig
    ) -> PreparedModel:
        """Optimizer and schedule, and the model wrapped at the moment that this backend needs."""
        if self.wraps_before_optimizer:
            model = self.prepare_model(model, is_training=True)
        optimizer = self.create_optimizer(
            model, lr=learning_rate, betas=config.adam_betas, weight_decay=config.l2
        )
        scheduler = self._create_scheduler(optimizer, max_steps, config)
        ready = PreparedModel(model, optimizer, scheduler)
        if self.wraps_before_optimizer:
            self._remember(ready)
            return ready
        return cast("PreparedModel", self.prepare(ready, is_rlhf=True))

    def prepare_models_and_optimizers(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_models: RewardModels,
        initial_model: nn.Module | None,
        args: Arguments | None,
        max_steps: int,
    ) -> tuple[PreparedModel, PreparedModel, RewardModels, nn.Module | None]:
        """Makes all models of a run ready, with optimizers and schedules for actor and critic.

        Args:
            actor: Marked with `is_actor = True`.
            critic: None for critic-free algorithms.
            reward_models: One, several or none; left alone with `remote_rm_url`.
            initial_model: The reference model, or None.
            args: Not needed; the strategy's own configuration counts.
            max_steps: Optimizer steps of the run; the schedule ends there.

        Returns:
            (actor, critic, reward_models, initial_model), the first two as PreparedModel.
        """
        del args
        actor.is_actor = True  # type: ignore[assignment]
        config = self.config
        ready_actor = self._trainable(actor, config.actor_learning_rate, max_steps, config)
        ready_critic = NO_MODEL
        if critic is not None:
            ready_critic = self._trainable(critic, config.critic_learning_rate, max_steps, config)
        if initial_model is not None:
            initial_model = self.prepare_model(initial_model)
        if not config.remote_rm_url and reward_models is not None:
            if isinstance(reward_models, nn.Module):
                reward_models = self.prepare_model(reward_models, shard_size=8)
            else:
                reward_models = [self.prepare_model(rm, shard_size=8) for rm in reward_models]
        self.sync_and_clear_cache()
        return ready_actor, ready_critic, reward_models, initial_model

    def prepare_reward_model(
        self, reward_model: nn.Module, args: Arguments | None = None, max_steps: int = int(1e8)
    ) -> PreparedModel:
        """Makes a reward model ready for training at `actor_learning_rate`.

        Args:
            reward_model: The model.
            args: Settings that replace the strategy's own.
            max_steps: Optimizer steps of the run.
        """
        config = self.config if args is None else StrategyConfig.from_args(args)
        ready = self._trainable(reward_model, config.actor_learning_rate, max_steps, config)
        self.sync_and_clear_cache()
        return ready

    def setup_dataloader(
        self,
        replay_buffer: Dataset[T],
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[T]], object] | None = None,
        drop_last: bool = True,
        sampler: Sampler[int] | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader[T]:
        """A loader of this rank's share of the data.

        Args:
            replay_buffer: Map-style data set, equal on all ranks.
            batch_size: Samples per batch of this rank.
            pin_memory, shuffle, collate_fn, drop_last: As in torch's DataLoader; `drop_last` also
                drops what does not divide evenly among ranks.
            sampler: Replaces the DistributedSampler.
            consumed_samples: Samples of the epoch already used, over all ranks.
        """
        if sampler is None:
            sampler = DistributedSampler(
                replay_buffer,
                num_replicas=self.world_size,
                rank=self.get_rank(),
                shuffle=shuffle,
                seed=self.seed,
                drop_last=drop_last,
                consumed_samples=consumed_samples,
            )
        return DataLoader(
            replay_buffer,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            # Every iterator draws a seed, and a resumed run makes one iterator more than a whole
            # one: not from the generator that checkpoints restore.
            generator=torch.Generator().manual_seed(self.seed),
        )

    @contextmanager
    def init_model_context(self, meta_init: bool = False) -> Iterator[None]:
        """Where models are built; with `meta_init` FSDP2 gives them no memory. Reports memory."""
        if meta_init and not self.builds_on_meta:
            self.print("warning: option without effect: meta_init acts only with fsdp")
        try:
            yield
        finally:
            self.report_memory("Finished init_model_context")

    def maybe_offload_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Moves optimizer states to the CPU (FSDP2 with `adam_offload`; elsewhere a no-op)."""
        return optimizer

    def maybe_load_optimizer(
        self, optimizer: Optimizer, device: torch.device | None = None
    ) -> Optimizer:
        """Moves optimizer states back (FSDP2 with `adam_offload`; elsewhere a no-op)."""
        del device
        return optimizer

    def offload_model(self, model: AnyModel) -> nn.Module:
        """Moves an idle model to the CPU."""
        return wrapped_module(model).to("cpu")

    def reload_model(self, model: AnyModel) -> nn.Module:
        """Moves a model back to this rank's device."""
        return wrapped_module(model).to(self.device)

    def moving_average(self, model: AnyModel, model_ema: AnyModel, beta: float = 0.992) -> None:
        """Ema <- beta * ema + (1 - beta) * model, for every parameter; call it once per step.

        Averages are kept in float32, shard by shard.

        Args:
            model: The trained model.
            model_ema: The average; prepared the same way as the model.
            beta: Weight of the past, in [0, 1].

        Raises:
            ValueError: The two have other parameters or shards, or `beta` is out of range.
        """
        self._averages.update(
            self.parameter_source(model), self.parameter_source(model_ema), beta=beta
        )

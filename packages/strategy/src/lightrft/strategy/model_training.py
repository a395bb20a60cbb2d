"""Models in training: their placement, optimizers, schedules and updates."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config.parts.training import TrainingOptions
from lightrft.strategy.backend import (
    NO_MODEL,
    AnyModel,
    Backend,
    PreparedModel,
    inner_module,
)
from lightrft.strategy.distributed import collectives, process_groups
from lightrft.strategy.optimizers import (
    AccumulationState,
    AdamSettings,
    OptimizerStepResult,
    check_rate_factors,
    learning_rate_schedule,
    unscaled_rate,
)
from lightrft.strategy.weight_sync.parameter_source import reshard_modules

if TYPE_CHECKING:
    from lightrft.strategy.checkpoints.moving_averages import MovingAverages


class ModelTraining:
    """The part of a strategy that updates models: optimizers, gradients, steps.

    Args:
        backend: Backend that places models on the ranks and takes their steps.
        on_change: Function to call when weights have changed; its argument says whether frozen
            ones may have, too.

    Attributes:
        num_skipped_steps: Steps skipped for their gradients, by name of the model.
    """

    def __init__(self, backend: Backend, on_change: Callable[[bool], None]) -> None:
        self.backend = backend
        self.context, self.config = backend.context, backend.config
        self.num_skipped_steps: defaultdict[str, int] = defaultdict(int)
        self.on_change = on_change
        self._states: weakref.WeakKeyDictionary[Optimizer, AccumulationState] = (
            weakref.WeakKeyDictionary()
        )
        self._trained: weakref.WeakKeyDictionary[
            nn.Module, tuple[Optimizer | None, LRScheduler | None]
        ] = weakref.WeakKeyDictionary()

    @property
    def accumulated_gradient(self) -> int:
        """Return the micro-batches of one optimizer step per rank; see `accumulation_steps`."""
        return process_groups.accumulation_steps(
            train_batch_size=self.config.train_batch_size,
            micro_train_batch_size=self.config.micro_train_batch_size,
            num_data_ranks=self.context.num_data_ranks,
            world_size=self.context.world_size,
        )

    def prepare(self, item: object, *, is_rlhf: bool) -> object:
        """Prepare one argument of `StrategyBase.prepare`."""
        if item is None:
            return None
        if isinstance(item, nn.Module):
            return self.backend.prepare_model(item)
        if isinstance(item, tuple) and len(item) in (2, 3) and not isinstance(item[1], nn.Module):
            model, optimizer, scheduler = (*item, None)[:3]
            if model is None:
                return NO_MODEL
            ready = self.with_optimizer(model, optimizer, scheduler)
            return ready if len(item) == 3 else (ready.model, ready.optimizer)
        if isinstance(item, list | tuple):
            size = 8 if is_rlhf else -1
            return [self.backend.prepare_model(model, shard_size=size) for model in item]
        raise TypeError(
            "prepare takes models, (model, optimizer[, scheduler]) tuples and lists of models, got "
            f"{type(item).__name__}"
        )

    def with_optimizer(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None = None
    ) -> PreparedModel:
        """Prepare one model and its optimizer."""
        return self._remember(self.backend.prepare_training(model, optimizer, scheduler))

    def _remember(self, ready: PreparedModel) -> PreparedModel:
        """Keep a model's optimizer and schedule for checkpoints, under every name it has."""
        if ready.model is not None:
            pair = (ready.optimizer, ready.scheduler)
            for module in {ready.model, inner_module(ready.model)}:
                self._trained[module] = pair
        return ready

    def resolve(
        self,
        model: AnyModel,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> PreparedModel:
        """Return a model with its optimizer and schedule: passed, attached, or remembered."""
        if not isinstance(model, PreparedModel):
            model = PreparedModel(model, *self._trained.get(model, (None, None)))
        return PreparedModel(
            model.model, optimizer or model.optimizer, scheduler or model.scheduler
        )

    def create_optimizer(self, model: AnyModel, **kwargs: object) -> Optimizer:
        """Create an optimizer; see `StrategyBase.create_optimizer`."""
        settings = AdamSettings.read(kwargs, self.config)
        return self.backend.create_optimizer(inner_module(model), settings)

    def _trainable(
        self, model: nn.Module, learning_rate: float, max_steps: int, config: TrainingOptions
    ) -> PreparedModel:
        """Make optimizer and schedule; wrap the model when this backend needs it."""
        wraps_first = self.backend.wraps_before_optimizer
        if wraps_first:
            model = self.backend.prepare_model(model, is_training=True)
        optimizer = self.create_optimizer(
            model, lr=learning_rate, betas=config.adam_betas, weight_decay=config.l2
        )
        scheduler = learning_rate_schedule(config, optimizer, max_steps=max_steps)
        if wraps_first:
            return self._remember(PreparedModel(model, optimizer, scheduler))
        return self.with_optimizer(model, optimizer, scheduler)

    def prepare_models(
        self,
        actor: nn.Module,
        critic: nn.Module | None = None,
        *,
        max_steps: int,
        frozen_steps: int = 0,
    ) -> tuple[PreparedModel, PreparedModel]:
        """Prepare actor and critic; see `StrategyBase.prepare_models_and_optimizers`."""
        actor.is_actor = True  # type: ignore[assignment]
        config, actor_steps = self.config, max(max_steps - frozen_steps, 1)
        ready_actor = self._trainable(actor, config.peak_learning_rate, actor_steps, config)
        ready_critic = NO_MODEL
        if critic is not None:
            ready_critic = self._trainable(critic, config.critic_learning_rate, max_steps, config)
        trained = [actor] if critic is None else [actor, critic]
        check_rate_factors(config.rate_factors, trained)
        self.context.free_memory()
        return ready_actor, ready_critic

    def prepare_reward_model(
        self, reward_model: nn.Module, max_steps: int, config: TrainingOptions | None = None
    ) -> PreparedModel:
        """Prepare a reward model; see `StrategyBase.prepare_reward_model`."""
        config = config or self.config
        check_rate_factors(config.rate_factors, [reward_model])
        ready = self._trainable(reward_model, config.peak_learning_rate, max_steps, config)
        self.context.free_memory()
        return ready

    def backward(self, loss: Tensor, model: AnyModel, optimizer: Optimizer) -> None:
        """Add the gradients of a loss; see `StrategyBase.backward`."""
        state = self._state_of(optimizer)
        scaled = loss * state.loss_scale(self.context.world_size)
        self.backend.backward(scaled, model, is_last=state.is_last())

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: AnyModel,
        scheduler: LRScheduler | None,
        name: str = "model",
    ) -> OptimizerStepResult | None:
        """Update after the last micro-batch; see `StrategyBase.optimizer_step`."""
        self.backend.check_trainable(model)
        if not self._state_of(optimizer).advance():
            return None
        learning_rate = unscaled_rate(optimizer)
        norm = self.backend.step(optimizer, model)
        is_skipped = not math.isfinite(norm)
        if is_skipped:
            self.num_skipped_steps[name] += 1
            self.context.print(
                f"warning: optimizer step of the {name} skipped: its gradients are not finite on "
                f"some rank (norm {norm}); {self.num_skipped_steps[name]} skipped so far"
            )
        else:
            # Only changed weights advance the schedule and make the engine stale.
            if scheduler is not None:
                scheduler.step()
            self.on_change(False)
        return OptimizerStepResult(norm, is_skipped, learning_rate)

    def require_finite(self, model: AnyModel) -> None:
        """Raise if weights are not finite; see `StrategyBase.require_finite`."""
        module = inner_module(model)
        reshard_modules(module)
        trained = (
            (name, self.backend.local_part(parameter))
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        )
        names = collectives.nonfinite_names(trained)
        collectives.require_finite(names, what="weights are", group=self.context.world_group)

    @cached_property
    def averages(self) -> MovingAverages:
        """Moving averages of models."""
        # Imported here: few runs keep any.
        from lightrft.strategy.checkpoints.moving_averages import MovingAverages

        return MovingAverages()

    def moving_average(self, model: AnyModel, average: AnyModel, beta: float) -> None:
        """Update an average; see `StrategyBase.moving_average`."""
        sources = (self.backend.parameter_source(each) for each in (model, average))
        self.averages.update(*sources, beta=beta)

    def load_weights(self, model: AnyModel, path: Path, *, strict: bool) -> None:
        """Load weights; see `StrategyBase.load_model`."""
        module = inner_module(model)
        self.backend.load_weights(module, path, strict=strict)
        self.averages.forget(module)
        self.on_change(True)

    def _state_of(self, optimizer: Optimizer) -> AccumulationState:
        """Return the progress of an optimizer; one in no step begins a step."""
        if optimizer not in self._states:
            size, count = self.config.sp_size, self.accumulated_gradient
            self._states[optimizer] = AccumulationState(count, sp_size=size)
        return self._states[optimizer]

    @contextmanager
    def accumulation(self, num_micro_batches: int, optimizer: Optimizer) -> Iterator[None]:
        """Set the micro-batches of a step; see `StrategyBase.accumulation`."""
        counts = self.context.gather_objects(int(num_micro_batches))
        count = counts[0]
        if min(counts) < 1 or min(counts) != max(counts):
            raise ValueError(
                f"num_micro_batches must be the same positive number on all ranks: got {counts}"
            )
        outer = self._states.get(optimizer)
        if outer is not None and (outer.takes_shares or outer.num_done > 0):
            raise RuntimeError(
                f"accumulation entered in the middle of an optimizer step ({outer.num_done} of "
                f"{outer.num_micro_batches} micro-batches done)"
            )
        state = self._states[optimizer] = AccumulationState(count, takes_shares=True)
        try:
            yield
            if state.num_done != count:
                raise RuntimeError(
                    f"accumulation left after {state.num_done} of {count} micro-batches: call "
                    "backward and optimizer_step for each"
                )
        except BaseException:
            # Accumulated gradients must not leak into the next step.
            self.backend.discard_gradients(optimizer)
            raise
        finally:
            del self._states[optimizer]

"""Models of a policy stage: options that are left to them and the machine; loading, preparation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from lightrft.algorithms.interface import advantage_traits
from lightrft.config import TrainConfig
from lightrft.models import Actor, Critic
from lightrft.models.sequence_model import freeze
from lightrft.stages.models import (
    configure_model,
    load_policy,
    place_frozen,
    require_equal_start,
    say_coverage,
    trained_model,
)
from lightrft.stages.policy.algorithm import build_estimator
from lightrft.stages.stage import TrainedModels
from lightrft.stages.teachers import load_teachers

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class FrozenModels:
    """Models that score the samples of a policy stage.

    Args:
        reference: None where there is none.
        teachers: Those of the run's processes by name, the only one as "".
    """

    reference: nn.Module | None = None
    teachers: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def all(self) -> tuple[nn.Module | None, ...]:
        """Reference and teachers."""
        return self.reference, *self.teachers.values()


def build_models(
    config: TrainConfig, strategy: StrategyBase, max_steps: int
) -> tuple[TrainedModels, FrozenModels]:
    """Loads and prepares actor and critic with the actor's moving average; and the frozen models.

    Args:
        config: Paths and options of the models.
        strategy: Prepares them.
        max_steps: Optimizer steps of the run, for the learning rate schedule.
    """
    path = str(config.pretrain)
    critic: Critic | None = None
    with strategy.init_model_context(config.meta_init):
        actor = load_policy(path, config)
        if advantage_traits(build_estimator(config)).needs_critic:
            critic_path = config.critic_pretrain
            critic = Critic.from_pretrained(
                critic_path if isinstance(critic_path, str) else path,
                allow_new_weights=config.allow_new_weights,
            )
    say_coverage(actor, strategy)
    # Before the strategy wraps and compiles them.
    for trained in (actor, critic):
        if trained is not None:
            configure_model(trained, config)
            freeze(trained, config.freeze_prefix)
    ready_actor, ready_critic, _, _ = strategy.prepare_models_and_optimizers(
        actor, critic, None, None, config, max_steps, frozen_steps=config.num_frozen_updates
    )
    ready = [trained_model("actor", ready_actor)]
    if critic is not None:
        ready.append(trained_model("critic", ready_critic))
    del actor, critic
    reference = None
    if config.init_kl_coef > 0:
        read = partial(Actor.from_pretrained, allow_new_weights=config.allow_new_weights)
        reference = place_frozen(partial(read, path), config, strategy)
        require_equal_start(strategy, ready_actor, reference)
    teachers = load_teachers(config, strategy)
    average = None
    if config.enable_ema:
        with strategy.init_model_context(config.meta_init):
            copied = load_policy(path, config)
        average = strategy.prepare_model(copied)
    return TrainedModels(tuple(ready), average), FrozenModels(reference, teachers)

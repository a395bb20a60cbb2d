"""The models of a run, loaded and prepared."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightrft.algorithms.declarations import advantage_traits
from lightrft.config import TrainConfig
from lightrft.models import Actor, Critic, LoraActor, load_causal_lm
from lightrft.strategy.prepared import PreparedModel
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.runs.rewards import prepare_reward_models
from lightrft.trainer.training.algorithm import build_estimator
from lightrft.trainer.training.construction import configure_model


@dataclass(frozen=True, slots=True)
class RunModels:
    """The prepared models of a run."""

    actor: PreparedModel
    critic: PreparedModel | None
    reference: nn.Module | None
    average: nn.Module | None = None
    reward_models: tuple[nn.Module, ...] = ()


def build_models(config: TrainConfig, strategy: StrategyBase, max_steps: int) -> RunModels:
    """Loads and prepares actor, critic, reference and reward models.

    Args:
        config: Paths and options of the models.
        strategy: Prepares them.
        max_steps: Optimizer steps of the run, for the learning rate schedule.
    """
    path = str(config.pretrain)
    critic: Critic | None = None
    reference: Actor | None = None
    with strategy.init_model_context(config.meta_init):
        actor = _load_policy(path, config)
        if advantage_traits(build_estimator(config)).needs_critic:
            critic_path = config.critic_pretrain
            critic = Critic.from_pretrained(critic_path if isinstance(critic_path, str) else path)
        if config.init_kl_coef > 0:
            reference = Actor.from_pretrained(path)
        average = _load_policy(path, config) if config.enable_ema else None
    # Before the strategy wraps and compiles them.
    for model in (actor, critic, reference):
        if model is not None:
            configure_model(model, config)
    ready_actor, ready_critic, _, ready_reference = strategy.prepare_models_and_optimizers(
        actor, critic, None, reference, config, max_steps
    )
    return RunModels(
        actor=ready_actor,
        critic=None if critic is None else ready_critic,
        reference=ready_reference,
        average=None if average is None else strategy.prepare_model(average),
        reward_models=prepare_reward_models(config, strategy),
    )


def _load_policy(path: str, config: TrainConfig) -> Actor:
    """The trained actor: with adapters where they are what is trained."""
    if config.lora_rank == 0:
        return Actor.from_pretrained(path)
    return LoraActor(load_causal_lm(path), config)

"""The rewards of a run: functions, services and models, with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from lightrft.algorithms.interface import advantage_traits
from lightrft.config import TrainConfig
from lightrft.datasets import Prompt
from lightrft.models import Actor, Critic, LoraActor, RewardModel, load_causal_lm, load_tokenizer
from lightrft.models.loading import ModelLoadError
from lightrft.models.sequence_model import freeze
from lightrft.rewards import CombinedReward, build_reward
from lightrft.rewards.build import load_recipes, numbered, reward_urls
from lightrft.rewards.types import RewardRecipes
from lightrft.rollout.model_rewards import ModelRewards, ScoringModel
from lightrft.stages.algorithm import build_estimator
from lightrft.stages.construction import configure_model
from lightrft.strategy.prepared import PreparedModel, inner_module
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.weight_sync.parameter_source import engine_source
from lightrft.strategy.weight_sync.verification import common_hashes, model_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_run_reward(
    config: TrainConfig, *, recipes: RewardRecipes | None = None
) -> CombinedReward:
    """The reward function of the options; a context manager that ends its processes."""
    return build_reward(
        config.reward_fn,
        weights=config.reward_weights[: num_functions(config)] or None,
        recipes=recipes,
        has_models=bool(config.reward_pretrain) or config.environment is not None,
        config=config,
    )


def num_functions(config: TrainConfig) -> int:
    """Rewards that are not models of this run."""
    return len(config.reward_fn) + len(reward_urls(config))


def reward_recipes(config: TrainConfig, prompts: Sequence[Prompt]) -> RewardRecipes | None:
    """The weights by row, or None without `reward_recipe`.

    Raises:
        ConfigError: The file is unusable.
        RewardError: A prompt has no recipe.
    """
    if config.reward_recipe is None:
        return None
    urls, models = reward_urls(config), config.reward_pretrain
    names = [
        *(name.rpartition(":")[2] for name in config.reward_fn),
        *(numbered("remote", i, len(urls)) for i in range(len(urls))),
        *(numbered("model", i, len(models)) for i in range(len(models))),
    ]
    recipes = load_recipes(config.reward_recipe, column=config.reward_recipe_column, names=names)
    # At the start: in a step it would be one rank's error between collectives.
    for prompt in prompts:
        recipes.weights_of(prompt.columns.get(recipes.column))
    return recipes


def prepare_reward_models(config: TrainConfig, strategy: StrategyBase) -> tuple[nn.Module, ...]:
    """Loads the reward models and shards each over at most 8 ranks."""
    with strategy.init_model_context():
        new = config.allow_new_weights
        models = [
            RewardModel.from_pretrained(path, allow_new_weights=new)
            for path in config.reward_pretrain
        ]
    # Not by prepare_models_and_optimizers, which leaves them alone beside a remote reward.
    return tuple(strategy.prepare_model(model, shard_size=8) for model in models)


def build_model_rewards(
    config: TrainConfig,
    strategy: StrategyBase,
    models: Sequence[nn.Module],
    *,
    tokenizer: PreTrainedTokenizerBase,
    recipes: RewardRecipes | None,
) -> ModelRewards | None:
    """The reward models of a run, or None without any.

    Args:
        config: Paths, weights and the rows of a forward pass.
        strategy: Prepared the models.
        models: In the order of `reward_pretrain`.
        tokenizer: Of the actor; a model with its vocabulary reads the sampled ids themselves.
        recipes: Weights by row, or None.
    """
    if not models:
        return None
    weights = config.reward_weights[num_functions(config) :] or (1.0,) * len(models)
    entries = []
    for index, (path, model) in enumerate(zip(config.reward_pretrain, models, strict=True)):
        own = load_tokenizer(path)
        is_same = own.get_vocab() == tokenizer.get_vocab()
        name = numbered("model", index, len(models))
        entries.append(ScoringModel(name, model, None if is_same else own, weights[index]))
    return ModelRewards(
        strategy, entries, micro_batch_size=config.micro_rollout_batch_size, recipes=recipes
    )


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
        actor = load_policy(path, config)
        if advantage_traits(build_estimator(config)).needs_critic:
            critic_path = config.critic_pretrain
            critic = Critic.from_pretrained(
                critic_path if isinstance(critic_path, str) else path,
                allow_new_weights=config.allow_new_weights,
            )
        if config.init_kl_coef > 0:
            reference = Actor.from_pretrained(path, allow_new_weights=config.allow_new_weights)
        average = load_policy(path, config) if config.enable_ema else None
    # Before the strategy wraps and compiles them.
    for model in (actor, critic, reference):
        if model is not None:
            configure_model(model, config)
    for trained in (actor, critic):
        if trained is not None:
            freeze(trained, config.freeze_prefix)
    ready_actor, ready_critic, _, ready_reference = strategy.prepare_models_and_optimizers(
        actor, critic, None, reference, config, max_steps
    )
    if ready_reference is not None:
        require_equal_start(strategy, ready_actor, ready_reference)
    return RunModels(
        actor=ready_actor,
        critic=None if critic is None else ready_critic,
        reference=ready_reference,
        average=None if average is None else strategy.prepare_model(average),
        reward_models=prepare_reward_models(config, strategy),
    )


def require_equal_start(strategy: StrategyBase, actor: PreparedModel, reference: nn.Module) -> None:
    """Proves that actor and reference, read from one path, start from the same weights; collective.

    Adapters are left out: they add nothing at first.

    Raises:
        ModelLoadError: They differ; the message names tensors.
    """
    module = inner_module(actor)
    source = replace(engine_source(module, strategy.parameter_source(actor)), add_local=None)
    hashes, expected = common_hashes(source, strategy.parameter_source(reference))
    names = sorted(n for n in hashes.keys() | expected.keys() if hashes.get(n) != expected.get(n))
    odd_ranks = [r for r, found in enumerate(strategy.gather_objects(names)) if found]
    if odd_ranks:
        raise ModelLoadError(
            f"actor and reference were read from the same path but differ in {len(names)} of "
            f"{len(expected)} tensors on rank(s) {odd_ranks}: {', '.join(names[:3])}; give a "
            "complete checkpoint that no other process is writing"
        )
    strategy.print_detail(
        f"actor and reference start from equal weights: {len(expected)} tensors, hash "
        f"{model_hash(expected) % 2**64:016x}"
    )


def load_policy(path: str, config: TrainConfig) -> Actor:
    """The trained actor: with adapters where they are what is trained."""
    if config.lora_rank == 0:
        return Actor.from_pretrained(path, allow_new_weights=config.allow_new_weights)
    return LoraActor(load_causal_lm(path, allow_new_weights=config.allow_new_weights), config)

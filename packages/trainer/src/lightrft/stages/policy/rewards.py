"""Rewards of a policy stage: functions, services and models, with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import nn

from lightrft.config import (
    ConfigError,
    RewardOptions,
    RolloutOptions,
    ScorerOptions,
    ScoringOptions,
    ShapingOptions,
    TrainConfig,
)
from lightrft.config.parts.learning import NO_REWARDS
from lightrft.datasets import Prompt
from lightrft.datasets.text_ids import frame_ids
from lightrft.engines.media.families import family_of
from lightrft.models.proof import prove_model
from lightrft.models.statements import read_statements
from lightrft.rewards import CombinedReward, build_reward
from lightrft.rewards.build import load_recipes, numbered, reward_urls
from lightrft.rewards.types import RewardFunction, RewardRecipes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.rollout.model_rewards import ModelRewards
    from lightrft.strategy.backend import Backend

    RewardSource = RewardFunction | nn.Module | Sequence[RewardFunction | nn.Module]


def build_run_reward(
    config: TrainConfig, *, recipes: RewardRecipes | None = None
) -> CombinedReward:
    """Return the reward function of the options; a context manager that ends its processes."""
    return build_reward(
        config.reward_fn,
        weights=config.reward_weights[: num_functions(config)] or None,
        recipes=recipes,
        has_models=bool(config.reward_pretrain)
        or config.environment is not None
        or config.has_agent
        or config.advantage_estimator == NO_REWARDS,
        config=config,
    )


def num_functions(config: ScorerOptions) -> int:
    """Return the number of rewards that are not models of this run."""
    return len(config.reward_fn) + len(reward_urls(config))


def reward_recipes(config: RewardOptions, prompts: Sequence[Prompt]) -> RewardRecipes | None:
    """Return the weights by row, or None without `reward_recipe`.

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
    # Checked at the start: during a step only one rank would raise, between collectives.
    for prompt in prompts:
        recipes.weights_of(prompt.columns.get(recipes.column))
    return recipes


def prepare_reward_models(config: TrainConfig, backend: Backend) -> tuple[nn.Module, ...]:
    """Load the reward models and shard each over at most 8 ranks."""
    if not config.reward_pretrain:
        return ()
    from lightrft.models import RewardModel  # most runs have none

    with backend.init_model_context():
        new = config.allow_new_weights
        models = [
            RewardModel.from_pretrained(path, allow_new_weights=new)
            for path in config.reward_pretrain
        ]
    # `prepare_models_and_optimizers` skips reward models beside a remote reward.
    prepared = tuple(backend.prepare_model(model, shard_size=8) for model in models)
    for model in prepared:
        prove_model(model, backend.context, is_random=True)
    return prepared


def build_model_rewards(
    config: RolloutOptions,
    backend: Backend,
    models: Sequence[nn.Module],
    *,
    tokenizer: PreTrainedTokenizerBase,
    recipes: RewardRecipes | None,
) -> ModelRewards | None:
    """Return the reward models of a run, or None without any.

    Args:
        config: Paths, weights and the rows of a forward pass.
        backend: Backend that prepared the models.
        models: Models in the order of `reward_pretrain`.
        tokenizer: Actor's; a model with its vocabulary reads the sampled ids themselves.
        recipes: Weights by row, or None.
    """
    if not models:
        return None
    from lightrft.rollout.model_rewards import ModelRewards, ScoringModel

    weights = config.reward_weights[num_functions(config) :] or (1.0,) * len(models)
    entries = [
        ScoringModel(numbered("model", index, len(models)), model, text_tokenizer, weights[index])
        for index, (model, text_tokenizer) in enumerate(
            zip(models, tokenizers_of_scorers(config, tokenizer), strict=True)
        )
    ]

    return ModelRewards(
        backend, entries, micro_batch_size=config.micro_rollout_batch_size, recipes=recipes
    )


def tokenizers_of_scorers(
    config: ScoringOptions, tokenizer: PreTrainedTokenizerBase
) -> list[PreTrainedTokenizerBase | None]:
    """Return the tokenizer of each reward model; None for one that reads the sampled ids.

    A model reads them if its tokenizer has the actor's vocabulary and frames a text alike. If
    messages are rendered, its chat template must be the actor's, too. Otherwise the model reads
    texts anew, as `lightrft reward` reads rows.

    Raises:
        ConfigError: A model would have to read episodes or messages anew, and cannot.
    """
    chosen: list[PreTrainedTokenizerBase | None] = []
    for path in config.reward_pretrain:
        said = read_statements(path, generates=False).require_consistent()
        scorer, is_chat = said.tokenizer, config.apply_chat_template
        # Models of images have their template in the processor.
        renders_alike = (
            scorer.chat_template in (None, tokenizer.chat_template) or family_of(said.config)
            if is_chat
            else frame_ids(scorer) == frame_ids(tokenizer)
        )
        if scorer.get_vocab() == tokenizer.get_vocab() and renders_alike:
            chosen.append(None)
            continue
        if config.has_episodes or (is_chat and not scorer.chat_template):
            other = (
                "episodes are tokens of the policy"
                if config.has_episodes
                else ("it has no chat template for the messages of the prompts")
            )
            raise ConfigError(
                f"reward_pretrain: {path} has another tokenizer or chat template than "
                f"{config.pretrain}, and {other}: give a reward model trained from the policy's "
                "own model"
            )
        chosen.append(scorer)
    return chosen


def build_trainer_rewards(
    source: RewardSource | None,
    model_rewards: ModelRewards | None,
    backend: Backend,
    config: ShapingOptions,
) -> tuple[RewardFunction, ModelRewards | None]:
    """Return the reward function and the reward models of a trainer.

    Args:
        source: Functions (objects with `score()`) and prepared modules that score each row of
            sampled ids: one, or a list whose rewards are added.
        model_rewards: Reward models with further tokenizers, weights or recipes.
        backend: Backend that prepared the modules.
        config: Rows of a forward pass.

    Raises:
        ValueError: There is no reward.
        TypeError: An item of `source` cannot score.
    """
    items = list(source) if isinstance(source, list | tuple) else [source] if source else []
    modules: list[nn.Module] = []
    functions: list[RewardFunction] = []
    for item in items:
        # A reward model's head is called `score`, too.
        score = getattr(item, "score", None)
        if callable(score) and not isinstance(score, nn.Module):
            functions.append(cast("RewardFunction", item))
        elif isinstance(item, nn.Module):
            modules.append(item)
        else:
            raise TypeError(
                f"a reward must be an nn.Module or have score(prompts, responses, labels, columns)"
                f": got {type(item).__name__}; see lightrft.rewards.RewardFunction"
            )
    if modules and model_rewards is not None:
        raise ValueError("give reward models as reward_model= or as model_rewards=, not as both")
    if modules:
        from lightrft.rollout.model_rewards import ModelRewards, ScoringModel

        scoring = [
            ScoringModel(numbered("model", index, len(modules)), module)
            for index, module in enumerate(modules)
        ]

        model_rewards = ModelRewards(
            backend, scoring, micro_batch_size=config.micro_rollout_batch_size
        )
    if not functions and model_rewards is None:
        raise ValueError(
            "the trainer needs a reward: pass reward_model= (lightrft.rewards.build_reward)"
        )
    if len(functions) == 1:
        return functions[0], model_rewards
    return CombinedReward(functions, [1.0] * len(functions)), model_rewards

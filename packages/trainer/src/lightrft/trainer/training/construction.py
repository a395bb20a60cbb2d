"""Checks of what a trainer is built from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lightrft.models import Actor, SequenceModel, load_tokenizer
from lightrft.strategy.config import ConfigError
from lightrft.strategy.prepared import PreparedModel
from lightrft.trainer.training.updates import TrainedModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedTokenizerBase

    from lightrft.rewards.types import RewardFunction
    from lightrft.strategy.strategy_base import StrategyBase
    from lightrft.trainer.ppo_config import PPOConfig


def check_processor(processor: object | None, *, is_needed: bool) -> None:
    """Raises an AssertionError if a processor is needed and missing."""
    if is_needed and processor is None:
        raise AssertionError(
            "a vision-language trainer needs processor=: got None; pass the model's processor "
            "(transformers.AutoProcessor)"
        )


def check_engine_group(strategy: StrategyBase) -> None:
    """Raises an AssertionError if no rank group of positive size hosts an engine."""
    size = strategy.config.engine_tp_size
    if size <= 0:
        raise AssertionError(
            f"engine_tp_size must be positive: got {size}; set --engine_tp_size 1 or more"
        )


def unused_options(config: PPOConfig, *, has_reference: bool) -> list[str]:
    """Options that are set and do nothing in this trainer, one sentence each."""
    rules = (
        (
            config.kl_target is not None and not has_reference,
            "kl_target acts only with a reference model and init_kl_coef > 0",
        ),
        (
            config.reward_running_norm_minus_mean and not config.reward_running_norm,
            "reward_running_norm_minus_mean acts only with reward_running_norm",
        ),
    )
    return [text for applies, text in rules if applies]


def configure_packing(
    config: PPOConfig, strategy: StrategyBase, models: Sequence[nn.Module | None]
) -> None:
    """Packs the samples of all models, or pads them, as configured.

    Raises:
        ConfigError: A model cannot be packed, or `sp_size` is not the strategy's.
    """
    if config.sp_size != strategy.config.sp_size:
        raise ConfigError(
            f"sp_size is {config.sp_size} in the trainer and {strategy.config.sp_size} in the "
            "strategy: set it where the strategy is made"
        )
    for model in models:
        module = None if model is None else strategy.unwrap_model(model)
        if isinstance(module, SequenceModel):
            module.pack_samples(config.packing_samples)
        elif config.packing_samples and module is not None:
            raise ConfigError(
                "packing_samples needs models of lightrft.models (Actor, Critic): got "
                f"{type(module).__name__}"
            )


def trained_model(
    name: str,
    model: nn.Module | PreparedModel,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
) -> TrainedModel:
    """A model with its optimizer, given apart or as a PreparedModel.

    Raises:
        ValueError: The model or its optimizer is missing.
    """
    module: nn.Module | None
    if isinstance(model, PreparedModel):
        module = model.model
        optimizer, scheduler = optimizer or model.optimizer, scheduler or model.scheduler
    else:
        module = model
    if module is None or optimizer is None:
        missing = "model" if module is None else "optimizer"
        raise ValueError(
            f"the {name} has no {missing}: pass what strategy.prepare_models_and_optimizers "
            f"returned, or {name}_optim="
        )
    return TrainedModel(name, module, optimizer, scheduler)


def load_actor_tokenizer(pretrain: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of the actor's checkpoint.

    Raises:
        ValueError: No checkpoint is known.
        ModelLoadError: It has no tokenizer.
    """
    if pretrain is None:
        raise ValueError("the trainer needs the actor's tokenizer: pass tokenizer=")
    return load_tokenizer(pretrain)


def is_deterministic(model: nn.Module) -> bool:
    """Whether two forward passes in training mode agree: no dropout, as far as can be told."""
    if not isinstance(model, Actor):
        return False
    has_layers = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in model.modules())
    return not has_layers and not _has_dropout(model.config.to_dict())


def _has_dropout(settings: Mapping[object, object]) -> bool:
    for name, value in settings.items():
        if isinstance(value, dict) and _has_dropout(value):
            return True
        is_dropout = str(name).endswith(("dropout", "pdrop", "dropout_prob"))
        if is_dropout and isinstance(value, int | float) and value > 0:
            return True
    return False


def build_trainer_reward(
    reward_model: RewardFunction | None, reward_fn: RewardFunction | None
) -> RewardFunction:
    """The reward function: `reward_fn`, else `reward_model`.

    Raises:
        ValueError: Neither is given.
        TypeError: It is a torch module or a list, which cannot score text.
    """
    chosen: object = reward_model if reward_fn is None else reward_fn
    if chosen is None:
        raise ValueError(
            "the trainer needs a reward: pass reward_model= (lightrft.rewards.build_reward)"
        )
    if isinstance(chosen, nn.Module | list | tuple):
        raise TypeError(
            "the reward must be one object with score(prompts, responses, labels, columns): got "
            f"{type(chosen).__name__}; wrap reward models in such an object, see "
            "lightrft.rewards.RewardFunction"
        )
    return reward_model if reward_fn is None else reward_fn  # type: ignore[return-value]

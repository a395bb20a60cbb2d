"""Checks of what a trainer is built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import options_of
from lightrft.engines.media.encoder import TEXT_ENCODER, Encoder, PromptEncoder
from lightrft.engines.media.families import family_of
from lightrft.models import Actor, SequenceModel, load_tokenizer
from lightrft.models.loading import load_config
from lightrft.models.packed_attention import packs_in_one_kernel
from lightrft.models.weight_files import count_model
from lightrft.rewards.build import CombinedReward, numbered
from lightrft.rewards.types import RewardFunction
from lightrft.rollout.model_rewards import ModelRewards, ScoringModel
from lightrft.stages.updates import TrainedModel
from lightrft.strategy.prepared import PreparedModel
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from lightrft.rollout.environments.environments import Environments

    RewardSource = RewardFunction | nn.Module | Sequence[RewardFunction | nn.Module]


BF16_BYTES = 2


def check_parts(strategy: StrategyBase, processor: object | None, *, needs_processor: bool) -> None:
    """Raises an AssertionError without a needed processor, or without a group for an engine."""
    if needs_processor and processor is None:
        raise AssertionError(
            "a vision-language trainer needs processor=: got None; pass the model's processor "
            "(transformers.AutoProcessor)"
        )
    size = strategy.config.engine_tp_size
    if size <= 0:
        raise AssertionError(
            f"engine_tp_size must be positive: got {size}; set --engine_tp_size 1 or more"
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the models before they are built.

    Args:
        num_weights: Numbers in the files of the actor.
        packs: Whether all that are trained pack with one kernel for all rows, on this rank.
        has_vision: Whether the actor reads images, which its files name otherwise than its modules.
    """

    num_weights: int
    packs: bool
    has_vision: bool = False


def read_model_facts(config: TrainConfig, strategy: StrategyBase) -> ModelFacts:
    """From the files of the models; see `ModelFacts`."""
    paths = {str(config.pretrain)}
    if isinstance(config.critic_pretrain, str):
        paths.add(config.critic_pretrain)
    uses_bf16 = config.computes_in_bf16(has_gpu=strategy.device.type == "cuda")
    packs = strategy.device.type == "cuda" and uses_bf16
    return ModelFacts(
        count_model(str(config.pretrain)),
        packs and all(map(packs_in_one_kernel, paths)),
        has_vision=family_of(load_config(str(config.pretrain))) is not None,
    )


def decide_by_machine(
    config: TrainConfig, strategy: StrategyBase, *, facts: ModelFacts | None = None
) -> TrainConfig:
    """The configuration with what its options leave to the machine; collective where they do.

    A choice for GPUs is made only where every rank has one, and printed.

    Args:
        config: With the same open options on every rank.
        strategy: Started.
        facts: Of the models; None if they are built already, by somebody who chose.
    """
    is_open = {
        "fused_linear_logprob": config.fused_linear_logprob is None,
        "meta_init": facts is not None and config.meta_init is None and config.fsdp,
        "packing_samples": facts is not None and config.packing_samples is None,
    }
    if not any(is_open.values()):
        return config
    own = {"on_cpu": int(strategy.device.type != "cuda"), "weights": 0, "pads": 0}
    if facts is not None:
        own |= {"weights": facts.num_weights, "pads": int(not facts.packs)}
    agreed = strategy.all_reduce(own, op="max")
    has_gpu, size = agreed["on_cpu"] == 0, BF16_BYTES * agreed["weights"]
    where = "every rank has a GPU" if has_gpu else "not every rank has a GPU"
    # Adapters are in no file that a rank could read its rows from.
    on_meta = config.builds_on_meta(has_gpu=has_gpu, weight_bytes=size) and config.lora_rank == 0
    on_meta = on_meta and not (facts is not None and facts.has_vision)
    packs, why = packing_by_machine(config, can_pack=has_gpu and agreed["pads"] == 0)
    decisions = {
        "fused_linear_logprob": (config.fuses_logprob(has_gpu=has_gpu), where),
        "meta_init": (on_meta, f"{where}, {size / 1e9:.1f} GB of weights"),
        "packing_samples": (packs, why),
    }
    chosen = {name: choice for name, choice in decisions.items() if is_open[name]}
    for name, (value, reason) in chosen.items():
        strategy.print_detail(f"{name} = {str(value).lower()}: {reason}")
    return config.replaced({name: value for name, (value, _) in chosen.items()})


def packing_by_machine(config: TrainConfig, *, can_pack: bool) -> tuple[bool, str]:
    """Whether samples are packed where nobody said so, and why."""
    if not can_pack:
        return False, "not every rank and model packs with one kernel (bfloat16 on a GPU)"
    options = options_of(TrainConfig)
    changed = [
        name
        for name in ("micro_train_batch_size", "micro_rollout_batch_size")
        if config.__dict__[name] != options[name][0].default
    ]
    if changed:
        return False, f"{' and '.join(changed)} count rows; --packing_samples counts tokens"
    return True, "one kernel for rows of any length"


def configure_models(
    config: TrainConfig, strategy: StrategyBase, models: Sequence[nn.Module | None]
) -> None:
    """Lays out samples, heads and activations of all models as configured.

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
            module.pack_samples(bool(config.packing_samples))
            configure_model(module, config)
        elif config.packing_samples and module is not None:
            raise ConfigError(
                "packing_samples needs models of lightrft.models (Actor, Critic): got "
                f"{type(module).__name__}"
            )


def check_environments(config: TrainConfig, *, has_environments: bool) -> None:
    """Raises a ConfigError if options name an environment or tools, and nobody answers calls."""
    if config.has_episodes and not has_environments:
        raise ConfigError(
            "environment and tools need workers: pass environments= "
            "(lightrft.rollout.environments.environments.Environments) to the trainer"
        )


def configure_model(model: SequenceModel, config: TrainConfig) -> None:
    """Turns on what the options ask of a model; what it was built with stays."""
    if config.gradient_checkpointing and not model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if isinstance(model, Actor):
        if config.fused_linear_logprob:
            model.fuse_head(config.chunk_size)
        if config.aux_loss_coef > 0 and not model.sums_routers:
            model.enable_router_sums()


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
    module = model.model if isinstance(model, PreparedModel) else model
    if isinstance(model, PreparedModel):
        optimizer, scheduler = optimizer or model.optimizer, scheduler or model.scheduler
    if module is None or optimizer is None:
        missing = "model" if module is None else "optimizer"
        raise ValueError(
            f"the {name} has no {missing}: pass what strategy.prepare_models_and_optimizers "
            f"returned, or {name}_optim="
        )
    return TrainedModel(name, module, optimizer, scheduler)


def prompt_encoder(
    processor: object | None,
    actor: nn.Module,
    config: TrainConfig,
    environments: Environments | None = None,
) -> Encoder:
    """The encoder of prompts; that of text without a processor or for a model of text.

    With environments it is theirs, so that each image is encoded once.

    Raises:
        ConfigError: Steps of a vision-language model are to be recorded for an audit.
    """
    if processor is None or not isinstance(actor, SequenceModel):
        return TEXT_ENCODER
    family = family_of(actor.config)
    if family is None:
        return TEXT_ENCODER
    if config.audit_every > 0:
        raise ConfigError(
            "an audit computes steps of text models again: leave audit_every out for a model of "
            f"type {family.model_type}"
        )
    if environments is not None and environments.encoder.reads_media:
        return environments.encoder
    return PromptEncoder(cast("ProcessorMixin", processor), family)


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


def build_trainer_rewards(
    source: RewardSource | None,
    model_rewards: ModelRewards | None,
    strategy: StrategyBase,
    config: TrainConfig,
) -> tuple[RewardFunction, ModelRewards | None]:
    """The reward function and the reward models of a trainer.

    Args:
        source: Functions (objects with `score()`) and prepared modules that give one score per
            row of the sampled ids, one or a list of them; their rewards are added.
        model_rewards: Reward models with tokenizers, weights or recipes of their own.
        strategy: Prepared the modules.
        config: Rows of a forward pass.

    Raises:
        ValueError: There is no reward.
        TypeError: One cannot score.
    """
    given = list(source) if isinstance(source, list | tuple) else [source] if source else []
    modules: list[nn.Module] = []
    functions: list[RewardFunction] = []
    for item in given:
        if callable(getattr(item, "score", None)):
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
        scoring = [
            ScoringModel(numbered("model", index, len(modules)), module)
            for index, module in enumerate(modules)
        ]
        model_rewards = ModelRewards(
            strategy, scoring, micro_batch_size=config.micro_rollout_batch_size
        )
    if not functions and model_rewards is None:
        raise ValueError(
            "the trainer needs a reward: pass reward_model= (lightrft.rewards.build_reward)"
        )
    if len(functions) == 1:
        return functions[0], model_rewards
    return CombinedReward(functions, [1.0] * len(functions)), model_rewards

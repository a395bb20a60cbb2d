"""Models of a policy stage: loaded, configured, prepared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.algorithms.interface import advantage_traits
from lightrft.config import ConfigError, TrainConfig
from lightrft.models import Actor, Critic, LoraActor, SequenceModel, load_causal_lm
from lightrft.models.loading import ModelLoadError
from lightrft.models.sequence_model import freeze
from lightrft.stages.policy.algorithm import build_estimator
from lightrft.stages.stage import TrainedModel, TrainedModels
from lightrft.strategy.prepared import PreparedModel, inner_module
from lightrft.strategy.weight_sync.parameter_source import engine_source
from lightrft.strategy.weight_sync.verification import common_hashes, model_hash

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


def build_models(
    config: TrainConfig, strategy: StrategyBase, max_steps: int
) -> tuple[TrainedModels, nn.Module | None]:
    """Loads and prepares actor and critic with the actor's moving average; and the reference.

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
    ready = [trained_model("actor", ready_actor)]
    if critic is not None:
        ready.append(trained_model("critic", ready_critic))
    prepared_average = None if average is None else strategy.prepare_model(average)
    return TrainedModels(tuple(ready), prepared_average), ready_reference


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


def trained_model(
    name: str,
    model: nn.Module | PreparedModel,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
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


def configure_model(model: SequenceModel, config: TrainConfig) -> None:
    """Turns on the parts of a model that the options ask for; those it was built with stay."""
    if config.gradient_checkpointing and not model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if isinstance(model, Actor):
        if config.fused_linear_logprob:
            model.fuse_head(config.chunk_size)
        if config.aux_loss_coef > 0 and not model.sums_routers:
            model.enable_router_sums()


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

"""Models of a policy stage: options that are left to them and the machine; loading, preparation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.algorithms.interface import advantage_traits
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.rules import is_served
from lightrft.models import Actor, Critic, LoraActor, SequenceModel, load_causal_lm
from lightrft.models.attention import try_packing
from lightrft.models.loading import ModelLoadError, load_config
from lightrft.models.lora import LoraModel
from lightrft.models.proof import Proof, prove_model, require_packing
from lightrft.models.sequence_model import freeze
from lightrft.models.statements import vocabulary_of
from lightrft.models.ulysses import LayoutRefusedError
from lightrft.models.varlen import KernelShape, use_newer_kernel, use_own_kernel
from lightrft.models.weight_files import count_model
from lightrft.stages.policy.algorithm import build_estimator
from lightrft.stages.stage import KeptDropout, TrainedModel, TrainedModels
from lightrft.strategy.backend import AnyModel, PreparedModel, inner_module
from lightrft.strategy.weight_sync.parameter_source import engine_source
from lightrft.strategy.weight_sync.verification import common_hashes, model_hash

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


# Attributes in which layers keep the share of weights, paths or layers that they drop, or noise.
NOISE = re.compile(
    r"(dropout(_p|_prob|_rate|_ratio)?|pdrop|drop_(prob|path)|layerdrop|^(input_)?jitter_noise)$"
)


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


def place_frozen(
    read: Callable[[], Actor], config: TrainConfig, strategy: StrategyBase
) -> nn.Module:
    """A model that scores, off the host before the next one is read."""
    with strategy.init_model_context(config.meta_init):
        model = read()
    configure_model(model, config)
    return strategy.prepare_model(model)


def load_teachers(config: TrainConfig, strategy: StrategyBase) -> dict[str, nn.Module]:
    """The teachers that are models of the run, prepared one by one; servers are none."""
    return {
        name: place_frozen(partial(Actor.from_pretrained, at), config, strategy)
        for name, at in config.teacher_places.items()
        if not is_served(at)
    }


def require_equal_start(strategy: StrategyBase, actor: AnyModel, reference: nn.Module) -> None:
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
    strategy.context.print_detail(
        f"actor and reference start from equal weights: {len(expected)} tensors, hash "
        f"{model_hash(expected) % 2**64:016x}"
    )


def say_coverage(model: SequenceModel, strategy: StrategyBase) -> None:
    """Prints which layers have adapters, and which weights have none."""
    if isinstance(model, LoraModel):
        strategy.print(model.coverage)


def load_policy(path: str, config: TrainConfig) -> Actor:
    """The trained actor: with adapters where they are what is trained."""
    model = load_causal_lm(path, allow_new_weights=config.allow_new_weights)
    actor = LoraActor(model, config) if config.lora_rank else Actor(model)
    actor.use_vocabulary(vocabulary_of(path, config))
    return actor


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
    config: TrainConfig,
    strategy: StrategyBase,
    models: Sequence[nn.Module | None],
    *,
    kept: KeptDropout,
) -> TrainConfig:
    """Lays out samples, heads and activations of all models as configured, and proves them once.

    Args:
        config, strategy, models: Options, what prepared the models, and the models.
        kept: Dropout that acts while the stage trains.

    Returns:
        The configuration; without packing where that was the machine's choice and a model mixes
        packed sequences.

    Raises:
        ConfigError: A model cannot be packed, or `sp_size` is not the strategy's.
        ModelLoadError: See `lightrft.models.proof.prove_model`.
    """
    if config.sp_size != strategy.config.sp_size:
        raise ConfigError(
            f"sp_size is {config.sp_size} in the trainer and {strategy.config.sp_size} in the "
            "strategy: set it where the strategy is made"
        )
    proofs: list[tuple[SequenceModel, Proof | None]] = []
    for model, module in _unwrapped(strategy, models):
        if kept != "model":
            turn_off_dropout(module, keeps_adapters=kept == "adapters")
        if isinstance(module, SequenceModel):
            module.pack_samples(False)
            configure_model(module, config)
            is_trained = any(each.requires_grad for each in module.parameters())
            drops = kept == "model" or (kept == "adapters" and config.lora_dropout > 0)
            proof = None
            if not module.is_proved:
                proof = prove_model(model, strategy.context, is_random=drops or not is_trained)
            proofs.append((module, proof))
        elif config.packing_samples:
            raise ConfigError(
                "packing_samples needs models of lightrft.models (Actor, Critic): got "
                f"{type(module).__name__}"
            )
    if config.packing_samples:
        config = _packed(config, strategy, proofs)
    for module, _ in proofs:
        module.is_proved = True
    return config


def prove_models(
    config: TrainConfig,
    strategy: StrategyBase,
    models: Sequence[nn.Module | None],
    *,
    kept: KeptDropout,
) -> TrainConfig:
    """See `configure_models`; the models pad again, for an engine copies one of them next."""
    config = configure_models(config, strategy, models, kept=kept)
    for _, module in _unwrapped(strategy, models):
        if isinstance(module, SequenceModel):
            module.pack_samples(False)
    return config


def _unwrapped(
    strategy: StrategyBase, models: Sequence[nn.Module | None]
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each model that there is, and the module that its strategy wrapped."""
    for model in models:
        if model is not None:
            yield model, strategy.unwrap_model(model)


def _packed(
    config: TrainConfig,
    strategy: StrategyBase,
    proofs: Sequence[tuple[SequenceModel, Proof | None]],
) -> TrainConfig:
    """Packs the samples of all models, or of none; see `configure_models`."""
    device = strategy.device.type
    bf16 = config.computes_in_bf16(has_gpu=device == "cuda")
    use_newer_kernel(KernelShape.of_model(model.config, device, bf16=bf16) for model, _ in proofs)
    try:
        for model, proof in proofs:
            model.pack_samples()
            if proof is not None:
                require_packing(proof)
    except LayoutRefusedError as refusal:
        if "packing_samples" not in strategy.chosen_options:
            raise ConfigError(f"packing_samples: {refusal}") from refusal
        for model, _ in proofs:
            model.pack_samples(False)
        use_own_kernel()
        strategy.chosen_options["packing_samples"] = str(refusal)
        strategy.print(f"packing_samples = false: {refusal}")
        return config.replaced({"packing_samples": False})
    return config


def configure_model(model: SequenceModel, config: TrainConfig) -> None:
    """Turns on the parts of a model that the options ask for; those it was built with stay."""
    if config.gradient_checkpointing and not model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if isinstance(model, Actor):
        if config.fused_linear_logprob:
            model.fuse_head(config.chunk_size)
        if config.aux_loss_coef > 0 and not model.sums_routers:
            model.enable_router_sums()


def turn_off_dropout(model: nn.Module, *, keeps_adapters: bool) -> None:
    """Sets all dropout of a model, and other noise of its training mode, to 0.

    A ratio to a reference, to an earlier pass or to another score is of the model as it is: with
    dropout it would be that of two random parts of it.

    Args:
        model: Is changed in place; its configuration, which is saved, stays.
        keeps_adapters: Leave that of adapters, which is asked for by an option.
    """
    for name, module in model.named_modules():
        if keeps_adapters and "lora_dropout" in name:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for attribute, value in vars(module).items():
            if isinstance(value, float) and NOISE.search(attribute):
                setattr(module, attribute, 0.0)


BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the models before they are built.

    Args:
        num_weights: Numbers in the files of the actor.
        packs: Whether all that are trained pack with one kernel for all rows, on this rank.
        packing: The kernel, or why there is none.
    """

    num_weights: int
    packs: bool
    packing: str = ""


def read_model_facts(config: TrainConfig, strategy: StrategyBase) -> ModelFacts:
    """From the files of the models; see `ModelFacts`."""
    paths = {str(config.pretrain)}
    others = (config.critic_pretrain, *config.teacher_places.values())
    paths |= {each for each in others if isinstance(each, str) and not is_served(each)}
    device = strategy.device.type
    bf16 = config.computes_in_bf16(has_gpu=device == "cuda")
    trials = [try_packing(load_config(path), device, bf16=bf16) for path in sorted(paths)]
    trial = min(trials, key=lambda each: each.works)
    return ModelFacts(
        count_model(str(config.pretrain)),
        trial.works,
        packing=trial.finding,
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
    on_meta = config.builds_on_meta(
        has_gpu=has_gpu,
        weight_bytes=size,
        is_in_files=not config.allow_new_weights,
    )
    packs, why = packing_by_machine(config, facts, can_pack=has_gpu and agreed["pads"] == 0)
    decisions = {
        "fused_linear_logprob": (config.fuses_logprob(has_gpu=has_gpu), where),
        "meta_init": (on_meta, f"{where}, {size / 1e9:.1f} GB of weights"),
        "packing_samples": (packs, why),
    }
    chosen = {name: choice for name, choice in decisions.items() if is_open[name]}
    strategy.chosen_options |= {name: reason for name, (_, reason) in chosen.items()}
    for name, (value, reason) in chosen.items():
        strategy.context.print_detail(f"{name} = {str(value).lower()}: {reason}")
    return config.replaced({name: value for name, (value, _) in chosen.items()})


def packing_by_machine(
    config: TrainConfig, facts: ModelFacts | None, *, can_pack: bool
) -> tuple[bool, str]:
    """Whether samples are packed where nobody said so, and why."""
    if not can_pack:
        if facts is None or facts.packs:
            return False, "not every rank packs with one kernel"
        return False, facts.packing
    if sizes := config.sizes_in_rows:
        return False, f"{' and '.join(sizes)} count rows; --packing_samples counts tokens"
    return True, "one kernel for rows of any length"

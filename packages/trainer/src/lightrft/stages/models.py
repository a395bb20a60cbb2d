"""Models of a stage: loading, preparation, layout and proofs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config import BuildOptions, ConfigError, TrainConfig
from lightrft.engines.media.text_encoder import TEXT_ENCODER, TextEncoder
from lightrft.models import Actor, SequenceModel, load_causal_lm
from lightrft.models.loading import ModelLoadError
from lightrft.models.proof import Proof, pack_rows, prove_model, share_prefixes
from lightrft.models.sequence_model import freeze
from lightrft.models.statements import vocabulary_of
from lightrft.models.types import LayoutRefusedError
from lightrft.models.varlen import KernelShape, try_kernel, use_newer_kernel, use_own_kernel
from lightrft.stages.stage import KeptDropout, TrainedModel
from lightrft.strategy.backend import AnyModel, PreparedModel, inner_module
from lightrft.strategy.weight_sync.parameter_source import base_source

if TYPE_CHECKING:
    from lightrft.engines.media.text_encoder import Encoder
    from lightrft.models.vision.proof import MediaProof
    from lightrft.strategy.backend import Backend
    from lightrft.strategy.distributed.context import DistributedContext


# Attributes of layers that hold a dropped share of weights, paths or layers, or noise.
NOISE = re.compile(
    r"(dropout(_p|_prob|_rate|_ratio)?|pdrop|drop_(prob|path)|layerdrop|^(input_)?jitter_noise)$"
)


def place_frozen(read: Callable[[], Actor], config: BuildOptions, backend: Backend) -> nn.Module:
    """Return a frozen model, prepared before the next one is read into host memory."""
    with backend.init_model_context(config.meta_init):
        model = read()
    configure_model(model, config)
    return backend.prepare_model(model)


def require_equal_start(backend: Backend, actor: AnyModel, reference: nn.Module) -> None:
    """Prove that actor and reference, read from one path, start from equal weights; collective.

    Adapters are left out: they add nothing at first.

    Raises:
        ModelLoadError: They differ; the message names tensors.
    """
    # Imported here: only runs with a reference of the actor's weights need hashes.
    from lightrft.strategy.weight_sync.verification import common_hashes, model_hash

    pair = (actor, reference)
    sources = (base_source(inner_module(each), backend.parameter_source(each)) for each in pair)
    hashes, expected = common_hashes(*sources)
    names = sorted(n for n in hashes.keys() | expected.keys() if hashes.get(n) != expected.get(n))
    odd_ranks = [
        r for r, differing in enumerate(backend.context.gather_objects(names)) if differing
    ]
    if odd_ranks:
        raise ModelLoadError(
            f"actor and reference were read from the same path but differ in {len(names)} of "
            f"{len(expected)} tensors on rank(s) {odd_ranks}: {', '.join(names[:3])}; give a "
            "complete checkpoint that no other process is writing"
        )
    backend.context.print_detail(
        f"actor and reference start from equal weights: {len(expected)} tensors, hash "
        f"{model_hash(expected) % 2**64:016x}"
    )


def configure_trained(
    model: SequenceModel,
    config: BuildOptions,
    context: DistributedContext,
    *,
    balances: bool = False,
) -> None:
    """Configure a model before it is wrapped and compiled; print its adapters."""
    if model.coverage:
        context.print(model.coverage)
    configure_model(model, config, balances=balances)
    freeze(model, config.freeze_prefix)


def load_policy(path: str, config: BuildOptions) -> Actor:
    """Return the actor to train, with adapters if only those are trained."""
    model = load_causal_lm(path, allow_new_weights=config.allow_new_weights)
    if config.lora_rank:
        from lightrft.models.lora import LoraActor  # of runs with adapters

        actor: Actor = LoraActor(model, config)
    else:
        actor = Actor(model)
    actor.use_vocabulary(vocabulary_of(path, config))
    return actor


def trained_model(
    name: str,
    model: nn.Module | PreparedModel,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
) -> TrainedModel:
    """Return a model with its optimizer, passed separately or as a PreparedModel.

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
    context: DistributedContext,
    models: Sequence[nn.Module | None],
    *,
    kept: KeptDropout,
    encoder: Encoder = TEXT_ENCODER,
) -> TrainConfig:
    """Set layout, heads and activations of all models as configured, and prove them once.

    Args:
        config, context, models: Options of the run, its ranks, and the models.
        kept: Dropout that acts while the stage trains.
        encoder: Encoder of rows with media, on which trained models are proved, too.

    Returns:
        Configuration; without packing if packing was the machine's choice and a model mixes packed
        sequences.

    Raises:
        ConfigError: A model cannot be packed, or `sp_size` is not the strategy's.
        ModelLoadError: See `lightrft.models.proof.prove_model`, and `prove_media` beside it.
    """
    if config.sp_size != context.config.sp_size:
        raise ConfigError(
            f"sp_size is {config.sp_size} in the trainer and {context.config.sp_size} in the "
            "strategy: set it where the strategy is made"
        )
    proofs: list[tuple[SequenceModel, Proof | None, MediaProof | None]] = []
    for model, module in _unwrapped(models):
        if kept != "model":
            turn_off_dropout(module, keeps_adapters=kept == "adapters")
        if isinstance(module, SequenceModel):
            module.pack_samples(False)
            configure_model(module, config, balances=config.aux_loss_coef > 0)
            is_trained = any(each.requires_grad for each in module.parameters())
            drops = kept == "model" or (kept == "adapters" and config.lora_dropout > 0)
            proof = None
            if not module.is_proved:
                proof = prove_model(model, context, is_random=drops or not is_trained)
            media = None
            if is_trained and not isinstance(encoder, TextEncoder):
                from lightrft.models.vision.proof import prove_media  # of rows with media

                media = prove_media(model, context, encoder)
            proofs.append((module, proof, media))
        elif config.packing_samples:
            raise ConfigError(
                "packing_samples needs models of lightrft.models (Actor, Critic): got "
                f"{type(module).__name__}"
            )
    if config.packing_samples:
        config = _packed(config, context, proofs)
    config = config.replaced({"shared_prefix": _sharing(config, context, proofs)})
    for module, _, _ in proofs:
        module.is_proved = True
    return config


def prove_models(
    config: TrainConfig,
    context: DistributedContext,
    models: Sequence[nn.Module | None],
    *,
    kept: KeptDropout,
    encoder: Encoder = TEXT_ENCODER,
) -> TrainConfig:
    """Configure and prove models as `configure_models`, then pad: an engine copies one next."""
    config = configure_models(config, context, models, kept=kept, encoder=encoder)
    for _, module in _unwrapped(models):
        if isinstance(module, SequenceModel):
            module.pack_samples(False)
    return config


def _unwrapped(models: Sequence[nn.Module | None]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each existing model and the module that its strategy wrapped."""
    for model in models:
        if model is not None:
            yield model, inner_module(model)


def _packed(
    config: TrainConfig,
    context: DistributedContext,
    proofs: Sequence[tuple[SequenceModel, Proof | None, MediaProof | None]],
) -> TrainConfig:
    """Pack the samples of all models, or of none; see `configure_models`."""
    device, bf16 = context.device.type, context.computes_in_bf16
    use_newer_kernel(
        KernelShape.of_model(model.config, device, bf16=bf16) for model, _, _ in proofs
    )
    try:
        for model, proof, media in proofs:
            if proof is None:
                model.pack_samples()
            else:
                pack_rows(proof)
            if media is not None:
                media.require_packing()
    except LayoutRefusedError as refusal:
        if "packing_samples" not in context.chosen_options:
            raise ConfigError(f"packing_samples: {refusal}") from refusal
        for model, _, _ in proofs:
            model.pack_samples(False)
        use_own_kernel()
        context.chosen_options["packing_samples"] = str(refusal)
        context.print(f"packing_samples = false: {refusal}")
        return config.replaced({"packing_samples": False})
    return config


def _sharing(
    config: BuildOptions,
    context: DistributedContext,
    proofs: Sequence[tuple[SequenceModel, Proof | None, MediaProof | None]],
) -> str:
    """Share prefixes in all models or in none, print why, and return that as the option."""
    how = config.shared_prefix
    try:
        if how != "off" and not config.packing_samples:
            raise LayoutRefusedError("it needs packed samples; add --packing_samples")
        for model, proof, media in proofs if how != "off" else ():
            shape = KernelShape.of_model(
                model.config, context.device.type, bf16=context.computes_in_bf16
            )
            trial = try_kernel(shape._replace(has_prefixes=True))
            is_slow = int(try_kernel(shape).works and not trial.works)
            if context.all_reduce(is_slow, op="max"):
                raise LayoutRefusedError(f"one call for each row would be slower: {trial.finding}")
            if proof is not None:
                share_prefixes(proof)
            elif model.layout_policy.min_shared_tokens is None:
                raise LayoutRefusedError("a model was proved without it")
            if media is not None:
                media.require_sharing()
    except LayoutRefusedError as refusal:
        how = "off"
        context.print(f"shared_prefix = off: {refusal}")
    for model, _, _ in proofs if how == "off" else ():
        model.share_prefixes(None)
    return how


def configure_model(model: SequenceModel, config: BuildOptions, *, balances: bool = False) -> None:
    """Enable the requested parts of a model; parts that it already has stay.

    Args:
        model: Model to change in place.
        config: Options that request them.
        balances: Sum the routers' choices, for a loss that balances experts.
    """
    if config.gradient_checkpointing and not model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if isinstance(model, Actor):
        if config.fused_linear_logprob:
            model.fuse_head(config.chunk_size)
        if balances and not model.sums_routers:
            model.enable_router_sums()


def turn_off_dropout(model: nn.Module, *, keeps_adapters: bool) -> None:
    """Set all dropout of a model, and other noise of its training mode, to 0.

    Ratios to a reference, an earlier pass or another score must be those of the full model. With
    dropout they would compare two random parts of it.

    Args:
        model: Model to change in place; its configuration, which is saved, stays.
        keeps_adapters: Keep the dropout of adapters, which is an option.
    """
    for name, module in model.named_modules():
        if keeps_adapters and "lora_dropout" in name:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for attribute, value in vars(module).items():
            if isinstance(value, float) and NOISE.search(attribute):
                setattr(module, attribute, 0.0)


def load_teachers(
    folders: Mapping[str, str], config: BuildOptions, backend: Backend
) -> dict[str, nn.Module]:
    """Return the teachers of some folders by name, prepared one by one."""
    return {
        name: place_frozen(partial(Actor.from_pretrained, at), config, backend)
        for name, at in folders.items()
    }


@dataclass(frozen=True, slots=True)
class FrozenModels:
    """Models that score the samples of a policy stage.

    Args:
        reference: Reference model, or None.
        teachers: Teachers in the run's processes, by name; "" is the only one.
    """

    reference: nn.Module | None = None
    teachers: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def all(self) -> tuple[nn.Module | None, ...]:
        """Reference and teachers."""
        return self.reference, *self.teachers.values()

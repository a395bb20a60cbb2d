"""Choice of options that are left to the models and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.config import TrainConfig
from lightrft.models.attention import try_packing
from lightrft.models.loading import load_config
from lightrft.models.weight_files import count_model

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext


BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the models, known before they are built.

    Args:
        num_weights: Numbers in the files of the actor.
        packs: Whether all trained models pack with one kernel for all rows, on this rank.
        packing: Name of the kernel, or the reason why there is none.
    """

    num_weights: int
    packs: bool
    packing: str = ""


def read_model_facts(config: TrainConfig, context: DistributedContext) -> ModelFacts:
    """Read facts about the models from their files."""
    paths = {str(config.pretrain)}
    others = (config.critic_pretrain, *config.teacher_folders.values())
    paths |= {each for each in others if isinstance(each, str)}
    device, bf16 = context.device.type, context.computes_in_bf16
    trials = [try_packing(load_config(path), device, bf16=bf16) for path in sorted(paths)]
    trial = min(trials, key=lambda each: each.works)
    return ModelFacts(
        count_model(str(config.pretrain)),
        trial.works,
        packing=trial.finding,
    )


def decide_by_machine(
    config: TrainConfig, context: DistributedContext, *, facts: ModelFacts | None = None
) -> TrainConfig:
    """Return the configuration with the machine's choices made; collective if there are any.

    A choice for GPUs is made only if every rank has one, and is printed.

    Args:
        config: Options, the same ones open on every rank.
        context: Started process groups.
        facts: Facts of the models; None if the caller built them already and chose.
    """
    is_open = {
        "fused_linear_logprob": config.fused_linear_logprob is None,
        "meta_init": facts is not None and config.meta_init is None and config.fsdp,
        "packing_samples": facts is not None and config.packing_samples is None,
    }
    if not any(is_open.values()):
        return config
    local = {"on_cpu": int(not context.has_gpu), "weights": 0, "pads": 0}
    if facts is not None:
        local |= {"weights": facts.num_weights, "pads": int(not facts.packs)}
    agreed = context.all_reduce(local, op="max")
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
    context.chosen_options |= {name: reason for name, (_, reason) in chosen.items()}
    for name, (value, reason) in chosen.items():
        context.print_detail(f"{name} = {str(value).lower()}: {reason}")
    return config.replaced({name: value for name, (value, _) in chosen.items()})


def packing_by_machine(
    config: TrainConfig, facts: ModelFacts | None, *, can_pack: bool
) -> tuple[bool, str]:
    """Return whether to pack samples if the user left it open, and why."""
    if not can_pack:
        if facts is None or facts.packs:
            return False, "not every rank packs with one kernel"
        return False, facts.packing
    if sizes := config.sizes_in_rows:
        return False, f"{' and '.join(sizes)} count rows; --packing_samples counts tokens"
    return True, "one kernel for rows of any length"

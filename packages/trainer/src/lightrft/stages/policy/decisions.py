"""Options that are left to the machine and its models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.config import TrainConfig
from lightrft.config.options import options_of
from lightrft.engines.media.families import family_of
from lightrft.models.attention import packs_in_one_kernel
from lightrft.models.loading import load_config
from lightrft.models.weight_files import count_model

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the models before they are built.

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
        packs and all(packs_in_one_kernel(load_config(path)) for path in paths),
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

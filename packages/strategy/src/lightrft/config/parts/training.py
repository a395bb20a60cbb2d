"""Options of one part of a run: how models are optimized: sizes, learning rates, precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightrft.config.options import (
    CRITIC,
    EVAL,
    LANGUAGE,
    NOT_SFT,
    SFT,
    Arguments,
    training_option,
)

REINFORCEMENT = "policy"


# Peak learning rates of all weights and of adapters, by stage. Where every token of a row teaches
# one can step further than on a few samples' rewards, and adapters move little at the same rate.
LEARNING_RATES: Mapping[str, tuple[float, float]] = {
    REINFORCEMENT: (1e-6, 1e-6),
    "sft": (1e-5, 1e-4),
    # A pair is one bit, and the loss is steep at the reference.
    "prefer": (1e-6, 1e-5),
    "reward": (1e-5, 1e-4),
    "divergence": (1e-5, 1e-4),
}


ADAM_MOVES = "At most 1: Adam moves each weight by about as much a step, and weights are smaller."


def default_learning_rate(stage: str = REINFORCEMENT, *, has_adapters: bool = False) -> float:
    """The peak learning rate of a stage; others than those of the table have reinforcement's."""
    return LEARNING_RATES.get(stage, LEARNING_RATES[REINFORCEMENT])[has_adapters]


def shown_learning_rates() -> str:
    """The table in one line, for the help of the option."""
    parts = []
    for stage, (whole, adapters) in LEARNING_RATES.items():
        command = {REINFORCEMENT: "train", "divergence": "distill on rows"}.get(stage, stage)
        parts.append(f"{command} {whole}" + (f" ({adapters} for adapters)" * (adapters != whole)))
    return ", ".join(parts)


@dataclass(kw_only=True)
class TrainingOptions:
    """How models are optimized: sizes, learning rates, precision."""

    seed: int = training_option(
        42,
        "Seed of all random number generators.",
        at_least=0,
        commands=(*EVAL, *SFT),
    )
    max_norm: float = training_option(
        1.0,
        "Global gradient norm above which gradients are scaled down; 0 never clips.",
        at_least=0,
        finite=False,
    )
    micro_train_batch_size: int = training_option(
        1,
        "Samples per rank in one forward and backward pass.",
        at_least=1,
        common=True,
    )
    train_batch_size: int = training_option(
        128,
        "Samples per optimizer step over all ranks. A step of train makes rollout_batch_size * "
        "n_samples_per_prompt / train_batch_size of them in each of max_epochs, 32 by default: "
        "the later ones are off-policy.",
        at_least=1,
        common=True,
    )
    bf16: bool | None = training_option(
        None,
        "Compute in bfloat16; unset means yes on a GPU and float32 on a CPU.",
        commands=(*EVAL, *SFT),
    )
    actor_learning_rate: float | None = training_option(
        None,
        f"Peak learning rate of the model that is trained; unset means {shown_learning_rates()}. "
        f"{ADAM_MOVES}",
        at_least=0,
        at_most=1,
        common=True,
        by_machine=True,
    )
    critic_learning_rate: float = training_option(
        9e-6,
        f"Peak learning rate of the critic. {ADAM_MOVES}",
        at_least=0,
        at_most=1,
        acts_with=CRITIC,
        commands=NOT_SFT,
    )
    adam_betas: tuple[float, float] = training_option(
        (0.9, 0.95),
        "Adam's decay rates of the two moments.",
    )
    learning_rate_factors: Arguments = training_option(
        None,
        "Learning rates of parts, as factors of the model's: visual=0.1 is the vision tower with "
        "its projector, lora_B=16 is LoRA+. Regular expressions for parts of names; the first that "
        "matches counts.",
    )
    l2: float = training_option(0.0, "Decoupled weight decay of matrices.", at_least=0)
    lr_warmup_ratio: float = training_option(
        0.03,
        "Share of all optimizer steps in which the learning rate rises; the first of them "
        "has a part of it already.",
        at_least=0,
        at_most=1,
    )
    lr_scheduler: str = training_option(
        "cosine_with_min_lr",
        "How the learning rate changes after the rise.",
        choices=("cosine_with_min_lr", "linear", "constant"),
    )
    min_lr_ratio: float = training_option(
        0.1,
        "Final over peak learning rate of cosine_with_min_lr.",
        at_least=0,
        at_most=1,
        acts_with="lr_scheduler cosine_with_min_lr",
    )
    gradient_checkpointing: bool = training_option(
        False,
        "Recompute activations in the backward pass.",
    )
    packing_samples: bool | None = training_option(
        None,
        "Pack several samples into one row without padding; unset means yes on GPUs with "
        "FlashAttention in bfloat16, where the models can and no micro_* size was changed.",
        by_machine=True,
    )
    use_mp_opt: bool = training_option(
        False,
        "FSDP2: bfloat16 parameters with float32 master copies in the optimizer.",
        acts_with="fsdp",
    )
    fused_linear_logprob: bool | None = training_option(
        None,
        "Compute logprobs, where it allows it the policy loss, and the output projection "
        "together, in chunks; unset means yes on GPUs and no on CPUs.",
        by_machine=True,
        commands=LANGUAGE,
    )
    chunk_size: int | None = training_option(
        None,
        "Vocabulary columns per chunk of the fused output projection; unset is what suits "
        "the device.",
        at_least=1,
        acts_with="fused_linear_logprob",
        commands=LANGUAGE,
    )

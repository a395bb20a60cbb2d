"""Training of models: optimizer, precision, and which weights."""

import math
import re
from collections.abc import Mapping

from lightrft.config.options import (
    Arguments,
    checks,
    is_number,
    option,
    part,
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
    """Return the peak learning rate of a stage; stages that the table lacks use reinforcement's."""
    return LEARNING_RATES.get(stage, LEARNING_RATES[REINFORCEMENT])[has_adapters]


def shown_learning_rates() -> str:
    """Return the table in one line, for the help of the option."""
    parts = []
    for stage, (whole, adapters) in LEARNING_RATES.items():
        command = {REINFORCEMENT: "train", "divergence": "distill on rows"}.get(stage, stage)
        parts.append(f"{command} {whole}" + (f" ({adapters} for adapters)" * (adapters != whole)))
    return ", ".join(parts)


@part("training")
class ComputeOptions:
    """Numbers of a process that computes with a model, and its deadline."""

    seed: int = option(
        42,
        "Seed of all random number generators.",
        at_least=0,
    )
    bf16: bool | None = option(
        None,
        "Compute in bfloat16; unset means yes on a GPU and float32 on a CPU.",
    )
    timeout_minutes: float = option(
        60.0,
        "Deadline of every collective and of every phase.",
        above=0,
        at_most=1e6,
        may_change=True,
        group="distributed",
    )

    def computes_in_bf16(self, *, has_gpu: bool) -> bool:
        """Return True if models compute in bfloat16: as set, else only on a GPU."""
        return has_gpu if self.bf16 is None else self.bf16


@part("training")
class HeadOptions:
    """Models whose head gives logits, with all weights in files."""

    fused_linear_logprob: bool | None = option(
        None,
        "Compute logprobs, where it allows it the policy loss, and the output projection "
        "together, in chunks; unset means yes on GPUs and no on CPUs.",
        by_machine=True,
    )
    chunk_size: int | None = option(
        None,
        "Vocabulary columns per chunk of the fused output projection; unset is what suits "
        "the device.",
        at_least=1,
        acts_with="fused_linear_logprob",
    )
    meta_init: bool | None = option(
        None,
        "FSDP2: build models without memory: ranks read their own rows of the files; unset "
        "means yes on GPUs, above 2 GB of weights and without allow_new_weights.",
        acts_with="fsdp",
        by_machine=True,
        group="distributed",
    )

    def fuses_logprob(self, *, has_gpu: bool) -> bool:
        """Return True if the output projection is fused: as set, else only on a GPU."""
        return has_gpu if self.fused_linear_logprob is None else self.fused_linear_logprob


def _factor_problems(factors: Mapping[str, object]) -> list[str]:
    problems = []
    for name, factor in factors.items():
        if not is_number(factor) or not 0 < factor < math.inf:
            problems.append(
                f"learning_rate_factors: got {name}={factor!r}, expected a number above 0; "
                "freeze_prefix keeps a part as it is"
            )
        try:
            re.compile(name)
        except re.error as error:
            problems.append(f"learning_rate_factors: {name!r} is no regular expression: {error}")
    return problems


@part("training")
class TrainingOptions(ComputeOptions):
    """Optimization: sizes, learning rates, precision."""

    max_norm: float = option(
        1.0,
        "Global gradient norm above which gradients are scaled down; 0 never clips.",
        at_least=0,
        finite=False,
    )
    micro_train_batch_size: int = option(
        1,
        "Samples per rank in one forward and backward pass.",
        at_least=1,
        common=True,
    )
    train_batch_size: int = option(
        128,
        "Samples per optimizer step over all ranks. With the defaults that is 512 * 8 / 128 = 32 "
        "optimizer steps per rollout (rollout_batch_size * n_samples_per_prompt / "
        "train_batch_size, times max_epochs); the later ones are off-policy.",
        at_least=1,
        common=True,
    )
    actor_learning_rate: float | None = option(
        None,
        f"Peak learning rate of the model that is trained; unset means {shown_learning_rates()}. "
        f"{ADAM_MOVES}",
        at_least=0,
        at_most=1,
        common=True,
        by_machine=True,
    )
    adam_betas: tuple[float, float] = option(
        (0.9, 0.95),
        "Adam's decay rates of the two moments.",
    )
    learning_rate_factors: Arguments = option(
        None,
        "Learning rates of parts, as factors of the model's: visual=0.1 is the vision tower with "
        "its projector, lora_B=16 is LoRA+. Regular expressions for parts of names; the first that "
        "matches counts.",
    )
    l2: float = option(0.0, "Decoupled weight decay of matrices.", at_least=0)
    lr_warmup_ratio: float = option(
        0.03,
        "Share of all optimizer steps in which the learning rate rises; the first of them "
        "has a part of it already.",
        at_least=0,
        at_most=1,
    )
    lr_scheduler: str = option(
        "cosine_with_min_lr",
        "How the learning rate changes after the rise.",
        choices=("cosine_with_min_lr", "linear", "constant"),
    )
    min_lr_ratio: float = option(
        0.1,
        "Final over peak learning rate of cosine_with_min_lr.",
        at_least=0,
        at_most=1,
        acts_with="lr_scheduler cosine_with_min_lr",
    )
    gradient_checkpointing: bool = option(
        False,
        "Recompute activations in the backward pass.",
    )
    packing_samples: bool | None = option(
        None,
        "Pack several samples into one row without padding; unset means yes on GPUs with "
        "FlashAttention in bfloat16, where the models can and no micro_* size was changed.",
        by_machine=True,
    )
    shared_prefix: str = option(
        "off",
        "Compute what packed samples begin with alike once, such as the prompt of a group: auto "
        "does so in micro-batches where it saves enough; off computes it for each sample.",
        choices=("auto", "off"),
    )
    use_mp_opt: bool = option(
        False,
        "FSDP2: bfloat16 parameters with float32 master copies in the optimizer.",
        acts_with="fsdp",
    )

    rules = checks(
        lambda c: (
            not all(0 <= beta < 1 for beta in c.adam_betas)
            and f"adam_betas: got {c.adam_betas!r}, expected two numbers in [0, 1)"
        ),
        lambda c: _factor_problems(c.learning_rate_factors or {}),
    )

    @property
    def peak_learning_rate(self) -> float:
        """Peak learning rate of the trained model; reinforcement's where no stage has set one."""
        rate = self.actor_learning_rate
        return default_learning_rate() if rate is None else rate

    @property
    def rate_factors(self) -> Mapping[str, float]:
        """Factors of the learning rate by part of a model's names."""
        return {part: float(value) for part, value in (self.learning_rate_factors or {}).items()}


@part("training")
class WeightOptions:
    """Weights that are trained, and tokens of a micro-batch."""

    lora_rank: int = option(
        0,
        "Train adapters of this rank on the actor instead of its weights; 0 trains the weights.",
        at_least=0,
        common=True,
    )
    lora_alpha: float = option(
        16.0,
        "Adapters count lora_alpha / lora_rank.",
        above=0,
        acts_with="lora_rank",
    )
    lora_path: str | None = option(
        None,
        "Adapters to start from, a folder in PEFT's format such as model/adapter of a run; of the "
        "same lora_rank, lora_alpha and layers. A reference is the model without them.",
    )
    lora_dropout: float = option(
        0.0,
        "Probability of leaving an input of an adapter out; without effect in reinforcement, where "
        "the ratios to earlier logprobs would be random.",
        at_least=0,
        at_most=0.99,
        acts_with="lora_rank",
    )
    target_modules: tuple[str, ...] = option(
        ("all-linear",),
        "Layers that get adapters: last names of linear layers, regular expressions for whole "
        "names (language_model.* is the text of a vision-language model), or all-linear.",
        acts_with="lora_rank",
    )
    quantize: str | None = option(
        None,
        "QLoRA: store the linear layers of the frozen model in 4 bits (bitsandbytes' NF4, its "
        "scales in 8); each is dequantised where it is used. The embedded engine takes the same "
        "codes (lora_sync), others the dequantised weights.",
        choices=("nf4",),
    )
    freeze_prefix: tuple[str, ...] = option(
        (),
        "Parts of actor and critic that are not trained, by regular expressions for the "
        "beginnings of their names: visual is the vision tower of Qwen-VL with its projector, "
        "visual(?!\\.merger) without.",
    )
    micro_batch_tokens: int | None = option(
        None,
        "Cut micro-batches by this many tokens, padding included, instead of by rows. Unset, it is "
        "decided at the start on GPUs unless a micro_* size was given: the largest power of two up "
        "to 32,768 whose memory plan fits, and at most what the batch has.",
        at_least=1,
        by_machine=True,
    )
    allow_new_weights: tuple[str, ...] = option(
        (),
        "Names of tensors (patterns like 'score.*') that may be missing from a checkpoint, of "
        "another shape or unused; those the model needs are initialised anew, alike in actor and "
        "reference.",
        group="models",
    )

    rules = checks(
        lambda c: (
            c.lora_path is not None
            and c.lora_rank == 0
            and "lora_path needs lora_rank: give that of the adapters (r in adapter_config.json)"
        ),
        lambda c: (
            c.quantize is not None
            and c.lora_rank == 0
            and "quantize: 4 bits take no update, so it needs adapters: add lora_rank"
        ),
    )

"""Options of one part of a run: which weights are trained, and how many tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    SFT,
    models_option,
    training_option,
)


@dataclass(kw_only=True)
class WeightOptions:
    """Which weights are trained, and how many tokens at a time."""

    lora_rank: int = training_option(
        0,
        "Train adapters of this rank on the actor instead of its weights; 0 trains the weights.",
        at_least=0,
        common=True,
    )
    lora_alpha: float = training_option(
        16.0,
        "Adapters count lora_alpha / lora_rank.",
        above=0,
        acts_with="lora_rank",
    )
    lora_path: str | None = training_option(
        None,
        "Adapters to start from, a folder in PEFT's format such as model/adapter of a run; of the "
        "same lora_rank, lora_alpha and layers. A reference is the model without them.",
    )
    lora_dropout: float = training_option(
        0.0,
        "Probability of leaving an input of an adapter out; without effect in reinforcement, where "
        "the ratios to earlier logprobs would be random.",
        at_least=0,
        at_most=0.99,
        acts_with="lora_rank",
    )
    target_modules: tuple[str, ...] = training_option(
        ("all-linear",),
        "Layers that get adapters: last names of linear layers, regular expressions for whole "
        "names (language_model.* is the text of a vision-language model), or all-linear.",
        acts_with="lora_rank",
    )
    freeze_prefix: tuple[str, ...] = training_option(
        (),
        "Parts of actor and critic that are not trained, by regular expressions for the "
        "beginnings of their names: visual is the vision tower of Qwen-VL with its projector, "
        "visual(?!\\.merger) without.",
    )
    micro_batch_tokens: int | None = training_option(
        None,
        "Cut micro-batches by this many tokens, padding included, instead of by rows. Unset, it is "
        "decided at the start on GPUs unless a micro_* size was given: the largest power of two up "
        "to 32,768 whose memory plan fits, and at most what the batch has.",
        at_least=1,
        by_machine=True,
    )
    allow_new_weights: tuple[str, ...] = models_option(
        (),
        "Names of tensors (patterns like 'score.*') that may be missing from a checkpoint, of "
        "another shape or unused; those the model needs are initialised anew, alike in actor and "
        "reference.",
        commands=SFT,
    )

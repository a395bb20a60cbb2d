"""The options of a training strategy: the part of the record that `get_strategy` needs."""

from __future__ import annotations

import copy
import importlib.util
import math
import re
import typing
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self, cast

from lightrft.config.options import (
    CRITIC,
    DATA_AND_EVAL,
    EVAL,
    LANGUAGE,
    NOT_SFT,
    SFT,
    ConfigError,
    OptionInfo,
    accepts,
    algorithm_option,
    check_value,
    coerce,
    did_you_mean,
    distributed_option,
    engine_option,
    looks_secret,
    models_option,
    monitoring_option,
    options_of,
    rollout_option,
    shown,
    training_option,
    type_hints,
)
from lightrft.config.other_names import said_once
from lightrft.config.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS

Arguments = Mapping[str, str | int | float | bool] | None
EngineType = Literal["vllm", "sglang", "hf", "auto"]
# Adapters travel as part of the weights that they change.
MERGED = "merged"
ENGINE_TYPES: tuple[str, ...] = typing.get_args(EngineType)
# Weights of which every rank would load a whole copy into the host's memory.
META_INIT_BYTES = 2_000_000_000
_NO_DEFAULT = object()
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
class StrategyConfig:
    """All that a strategy needs to know; every field has a default.

    Unknown arguments given to `from_args` are kept in `extra_args` and read by `get_extra_arg`.
    `TrainConfig` adds the options of a whole run.

    Raises:
        ConfigError: Values of wrong type or out of range; one message names every such field.
    """

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
    fsdp: bool = distributed_option(
        False,
        "Use FSDP2 instead of DeepSpeed ZeRO; without that package it is used anyway, unless an "
        "option of DeepSpeed's is set.",
        common=True,
    )
    zero_stage: int = distributed_option(
        2, "DeepSpeed ZeRO stage.", choices=(0, 1, 2, 3), acts_with="not fsdp"
    )
    fsdp_cpu_offload: bool = distributed_option(
        False,
        "FSDP2: keep parameters, gradients and optimizer states on the CPU.",
        acts_with="fsdp",
    )
    adam_offload: bool = distributed_option(
        False,
        "Keep Adam's states on the CPU (FSDP2: between training phases).",
    )
    adam_8bit: bool = distributed_option(
        False,
        "FSDP2 in one process: keep Adam's moments in 8 bits a number (bitsandbytes).",
    )
    zpg: int = distributed_option(
        1,
        "ZeRO++ secondary partition size; 1 is off.",
        at_least=1,
        acts_with="not fsdp",
    )
    grad_accum_dtype: str | None = distributed_option(
        None,
        "DeepSpeed: dtype in which gradients accumulate; unset is fp32.",
        choices=("fp32", "bf16", "fp16"),
        acts_with="not fsdp",
    )
    overlap_comm: bool = distributed_option(
        False,
        "DeepSpeed: reduce gradients while the backward pass runs.",
        acts_with="not fsdp",
    )
    sp_size: int = distributed_option(
        1,
        "Ranks that share one sequence (sequence parallelism).",
        at_least=1,
    )
    local_rank: int = distributed_option(
        -1,
        "Index of this process' device on its node; -1 reads LOCAL_RANK.",
        at_least=-1,
        may_change=True,
    )
    mixed_mm_data: bool = distributed_option(
        False,
        "Ranks may differ in having images; the vision tower stays in FSDP2's root unit.",
        acts_with="fsdp",
        commands=NOT_SFT,
    )
    async_save: bool = distributed_option(
        False,
        "Write checkpoints in the background, from copies in host memory.",
    )
    meta_init: bool | None = distributed_option(
        None,
        "FSDP2: build models without memory: ranks read their own rows of the files; unset "
        "means yes on GPUs, above 2 GB of weights and without allow_new_weights.",
        acts_with="fsdp",
        by_machine=True,
        commands=LANGUAGE,
    )
    compile_backend: str | None = distributed_option(
        None,
        "FSDP2: compile every block by torch.compile with this backend; unset does not.",
        choices=("inductor", "aot_eager", "eager"),
        acts_with="fsdp",
    )
    timeout_minutes: float = distributed_option(
        60.0,
        "Deadline of every collective and of every phase.",
        above=0,
        at_most=1e6,
        may_change=True,
        commands=(*EVAL, *SFT),
    )
    devices_shared: bool = distributed_option(
        False,
        "Lets ranks that only generate use the GPUs of ranks that train, for trials: slower, and "
        "the memory of both lies on one device.",
        acts_with="rollout_ranks",
        may_change=True,
    )
    fsdp_shard_size: int = distributed_option(
        -1,
        "FSDP2: ranks over which a model is divided, mostly those of a node; groups of so many "
        "ranks are replicas (HSDP). -1 divides over all.",
        at_least=-1,
        acts_with="fsdp",
    )
    engine_type: str = engine_option(
        "vllm",
        "Rollout engine.",
        choices=ENGINE_TYPES,
        common=True,
        commands=EVAL,
    )
    engine_tp_size: int = engine_option(
        1,
        "Ranks that share one engine (tensor parallelism).",
        at_least=1,
        commands=EVAL,
    )
    engine_mem_util: float = engine_option(
        0.5,
        "Share of device memory the engine may take.",
        above=0,
        at_most=1,
        may_change=True,
        commands=EVAL,
    )
    enable_engine_sleep: bool = engine_option(
        True,
        "Release the engine's memory while the trainer runs.",
        may_change=True,
    )
    engine_args: Arguments = engine_option(
        None,
        "Further options under the engine's own names.",
        commands=EVAL,
    )
    max_len: int | None = engine_option(
        None,
        "Longest prompt plus completion, in tokens.",
        at_least=1,
    )
    weight_bucket_mb: int = engine_option(
        256,
        "Size of one weight transfer bucket.",
        at_least=1,
        may_change=True,
    )
    lora_sync: str = engine_option(
        MERGED,
        "What goes to the engine with lora_rank: merged weights, or the adapters alone to an "
        "engine that holds them beside its weights (hf, vllm).",
        choices=(MERGED, "adapter"),
        acts_with="lora_rank",
    )
    verify_weight_sync: bool = engine_option(
        True,
        "Compare hashes of the trainer's and the engine's weights.",
        may_change=True,
    )
    rm_use_engine: bool = engine_option(
        False,
        "Serve reward models by an engine.",
    )
    rm_engine_cudagraph: bool = engine_option(
        False,
        "CUDA graphs in the reward engine.",
    )
    pretrain: str | None = models_option(
        None,
        "Checkpoint directory of the actor.",
        common=True,
        path="folder",
        commands=("data", *SFT),
    )
    critic_pretrain: str | bool | None = models_option(
        False,
        "Checkpoint directory of the critic; unset trains no critic.",
        path="folder",
        acts_with=CRITIC,
    )
    remote_rm_url: str | tuple[str, ...] | None = models_option(
        None,
        "Address of a reward service, in which ${NAME} is an environment variable; local "
        "reward models are then left alone.",
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    pretrain_data: str | None = models_option(
        None,
        "Rows as those of lightrft sft, whose loss is mixed in: texts, conversations, answers.",
        acts_with="ptx_coef",
        path="file",
    )
    micro_rollout_batch_size: int = rollout_option(
        2,
        "Samples per rank in one forward pass before training.",
        at_least=1,
        acts_with="not micro_batch_tokens",
    )
    n_samples_per_prompt: int = rollout_option(
        8,
        "Completions per prompt.",
        at_least=1,
        common=True,
    )
    advantage_estimator: str = algorithm_option(
        "group_norm",
        "Advantage estimator; gae is PPO with a critic.",
        choices=ADVANTAGE_ESTIMATORS,
        common=True,
    )
    use_kl_loss: bool = rollout_option(
        False,
        "Put the KL divergence into the loss instead of the reward.",
    )
    kl_estimator: str | None = rollout_option(
        None,
        "Estimator of the KL divergence; unset is k1 in the reward, where no other is right, and "
        "k3+ in the loss.",
        choices=KL_ESTIMATORS,
        acts_with="init_kl_coef",
    )
    advantages_norm: bool = rollout_option(
        False,
        "Normalise advantages over all ranks.",
    )
    advantage_clip: float = rollout_option(
        0.0,
        "Clip advantages to this magnitude; 0 is off.",
        at_least=0,
    )
    reward_clip: float = rollout_option(
        0.0,
        "Clip rewards to this magnitude; 0 is off.",
        at_least=0,
    )
    reward_running_norm: bool = rollout_option(
        False,
        "Divide rewards by their running standard deviation.",
    )
    reward_running_norm_minus_mean: bool = rollout_option(
        False,
        "Subtract the running mean as well.",
        acts_with="reward_running_norm",
    )
    overlong_buffer: bool = rollout_option(
        False,
        "Punish overlong responses softly.",
    )
    overlong_buffer_len: int = rollout_option(
        1024,
        "Tokens before the limit in which the punishment rises.",
        at_least=1,
        acts_with="overlong_buffer",
    )
    overlong_buffer_penalty_factor: float = rollout_option(
        1.0,
        "Punishment at the limit.",
        at_least=0,
        acts_with="overlong_buffer",
    )
    mask_truncated: bool = rollout_option(
        False,
        "Train on no token of a response that was cut at its limit; its reward still counts in "
        "the baseline of its group.",
    )
    dynamic_sampling: bool = rollout_option(
        False,
        "Draw again for groups whose rewards are all equal.",
    )
    log_dir: str | None = monitoring_option(
        None,
        "Folder of logs and of length distributions.",
        commands=NOT_SFT,
    )
    plot_every: int = monitoring_option(
        -1,
        "Write the generation length distribution every N steps; 0 or less never.",
        acts_with="log_dir",
        commands=NOT_SFT,
    )
    use_tensorboard: str | bool | None = monitoring_option(
        False,
        "Write TensorBoard logs, into this folder or OUTPUT_DIR/tensorboard.",
    )
    strict: bool = monitoring_option(
        False,
        "Options without effect are errors instead of warnings.",
    )

    extra_args: dict[str, object] = field(default_factory=dict, repr=False)
    # Names of options that a command, a file or a call set, also to their default.
    explicit: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __post_init__(self) -> None:
        found = self.problems()
        if found:
            raise ConfigError("invalid configuration:\n  " + "\n  ".join(found))

    def problems(self) -> list[str]:
        """Problems of the values, one line each; empty if there are none."""
        hints = type_hints(type(self))
        checked = (
            check_value(name, self.__dict__[name], hints[name], info)
            for name, (_, info) in options_of(type(self)).items()
        )
        found = [problem for problem in checked if problem is not None]
        if self.fsdp_shard_size == 0:
            found.append("fsdp_shard_size: got 0, expected -1 (all ranks) or at least 1")
        betas = self.adam_betas
        if accepts(betas, tuple[float, float]) and not all(0 <= beta < 1 for beta in betas):
            found.append(f"adam_betas: got {betas!r}, expected two numbers in [0, 1)")
        return found + _factor_problems(self.learning_rate_factors)

    def unused_options(self) -> list[str]:
        """Options that were changed but do nothing in the chosen mode, one sentence each."""
        found = []
        for name, (entry, info) in options_of(type(self)).items():
            if self.__dict__[name] != entry.default and not self._acts(info):
                needed = str(info.acts_with)
                verb = "acts only without" if needed.startswith("not ") else "acts only with"
                found.append(f"{name} {verb} {needed.removeprefix('not ')}")
        rules = (
            (
                self.fsdp and self.fsdp_cpu_offload and self.adam_offload,
                "adam_offload has no effect: fsdp_cpu_offload keeps Adam's states on the CPU",
            ),
            (
                not self.fsdp and self.zpg != 1 and self.zero_stage != 3,
                "zpg acts only with zero_stage 3",
            ),
            (self.rm_use_engine, "rm_use_engine: reward models run in the trainer's process"),
            (self.rm_engine_cudagraph, "rm_engine_cudagraph: no reward engine exists"),
        )
        return found + [text for applies, text in rules if applies]

    def _acts(self, info: OptionInfo) -> bool:
        """Whether an option that `acts_with` names has the value that is needed."""
        return any(self._holds(needed) for needed in (info.acts_with or "").split(" or "))

    def _holds(self, needed: str) -> bool:
        name, _, value = needed.removeprefix("not ").partition(" ")
        if needed in ("", CRITIC):
            return True
        if name not in self.__dict__:  # an option of a whole run
            return True
        actual = self.__dict__[name]
        is_set = str(actual) == value if value else bool(actual)
        return is_set != needed.startswith("not ")

    @classmethod
    def from_args(cls, args: Namespace | Mapping[str, object] | StrategyConfig | None) -> Self:
        """Builds a configuration from parsed arguments, a mapping or another configuration.

        Unknown names go to `extra_args`. A None for a field that cannot be None means its default.
        A configuration of this class (or of a subclass) is copied and keeps its class.

        Raises:
            TypeError: `args` is none of these.
            ConfigError: A value is wrong.
        """
        if args is None:
            return cls()
        if isinstance(args, cls):
            twin = copy.copy(args)
            twin.extra_args = dict(args.extra_args)
            return twin
        given = _as_dict(args)
        nested = given.pop("extra_args", None)
        if isinstance(nested, Mapping):
            given = {**nested, **given}
        if given.pop("disable_engine_sleep", False):
            given["enable_engine_sleep"] = False
        hints = type_hints(cls)
        known: dict[str, object] = {}
        extras: dict[str, object] = {}
        for name, value in given.items():
            if name not in hints:
                extras[name] = value
            elif value is not None or accepts(None, hints[name]):
                known[name] = coerce(value, hints[name])
        return cls(**known, extra_args=extras)  # type: ignore[arg-type]

    def get_extra_arg(self, name: str, default: object = _NO_DEFAULT) -> object:
        """The value of an argument that is not a field of `StrategyConfig`.

        Args:
            name: Name of the argument; a field's name returns the field.
            default: Returned if nobody gave the argument.

        Raises:
            KeyError: Unknown and no default; the message lists the nearest names.
        """
        if name in self.extra_args:
            return self.extra_args[name]
        names = list(self.__dataclass_fields__)
        if name in names:
            value: object = self.__dict__[name]
            return value
        if default is not _NO_DEFAULT:
            return default
        hint = did_you_mean(name, [*self.extra_args, *names])
        raise KeyError(
            f"no argument {name!r} was given and get_extra_arg has no default for it{hint}"
        )

    def deepspeed_options(self) -> list[str]:
        """Return the changed options that only DeepSpeed has."""
        return [
            name
            for name, (entry, info) in options_of(type(self)).items()
            if info.acts_with == "not fsdp" and self.__dict__[name] != entry.default
        ]

    @property
    def lacks_deepspeed(self) -> bool:
        """Whether DeepSpeed is neither installed nor asked for: unset, `fsdp` is as if set."""
        return importlib.util.find_spec("deepspeed") is None and not self.deepspeed_options()

    def with_installed_backend(self) -> Self:
        """Return the options with FSDP2 where DeepSpeed is not installed and not asked for."""
        if self.fsdp or not self.lacks_deepspeed:
            return self
        said_once("FSDP2 trains, as with --fsdp: DeepSpeed is not installed")
        chosen = copy.copy(self)
        chosen.fsdp = True
        return chosen

    @property
    def peak_learning_rate(self) -> float:
        """Of the model that is trained; that of reinforcement where no stage decided."""
        rate = self.actor_learning_rate
        return default_learning_rate() if rate is None else rate

    @property
    def rate_factors(self) -> Mapping[str, float]:
        """Factors of the learning rate by part of a model's names."""
        return {part: float(value) for part, value in (self.learning_rate_factors or {}).items()}

    def computes_in_bf16(self, *, has_gpu: bool) -> bool:
        """Whether models compute in bfloat16: as set, else exactly on a GPU."""
        return has_gpu if self.bf16 is None else self.bf16

    def fuses_logprob(self, *, has_gpu: bool) -> bool:
        """Whether the output projection is fused: as set, else exactly on a GPU."""
        return has_gpu if self.fused_linear_logprob is None else self.fused_linear_logprob

    def builds_on_meta(self, *, has_gpu: bool, weight_bytes: int, is_in_files: bool = True) -> bool:
        """Whether models are built without memory: as set, else on GPUs above 2 GB of weights.

        Args:
            has_gpu: Whether every rank has a GPU.
            weight_bytes: Of the actor in bfloat16.
            is_in_files: Whether the files have all weights of the models: not new ones.
        """
        if self.meta_init is not None:
            return self.meta_init
        return self.fsdp and has_gpu and is_in_files and weight_bytes > META_INIT_BYTES

    def summary(self) -> str:
        """All values by group, changed ones marked with `*`, secrets hidden."""
        groups: dict[str, list[str]] = {}
        for name, (entry, info) in options_of(type(self)).items():
            value = self.__dict__[name]
            mark = " " if value == entry.default else "*"
            line = f" {mark} {name} = {shown(value, secret=info.secret)}"
            groups.setdefault(info.group, []).append(line)
        if self.extra_args:
            groups["extra"] = [
                f"   {name} = {shown(value, secret=looks_secret(name))}"
                for name, value in self.extra_args.items()
            ]
        return "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in groups.items())

    def print_config_summary(self) -> None:
        """Writes `summary` to standard output."""
        print(self.summary())  # noqa: T201


def _factor_problems(factors: object) -> list[str]:
    found: list[str] = []
    # Its type is checked like that of any option.
    for part, factor in factors.items() if isinstance(factors, Mapping) else ():
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or not 0 < float(cast("float", factor)) < math.inf:
            found.append(
                f"learning_rate_factors: got {part}={factor!r}, expected a number above 0; "
                "freeze_prefix keeps a part as it is"
            )
        try:
            re.compile(part)
        except re.error as error:
            found.append(f"learning_rate_factors: {part!r} is no regular expression: {error}")
    return found


def _as_dict(args: Namespace | Mapping[str, object] | StrategyConfig) -> dict[str, object]:
    if isinstance(args, Mapping):
        return dict(args)
    if isinstance(args, StrategyConfig):
        return dict(args.__dict__)
    try:
        return dict(vars(args))
    except TypeError:
        raise TypeError(
            f"expected a Namespace, a mapping or a StrategyConfig, got {type(args).__name__}"
        ) from None

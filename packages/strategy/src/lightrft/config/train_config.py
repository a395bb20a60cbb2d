"""The one record of a training run, from which flags, TOML and help are derived."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lightrft.config.options import ConfigError, option, options_of, part
from lightrft.config.other_names import (
    A_DATA_FILE,
    A_MODEL,
    TABLE_HINT,
    option_hint,
    said_once,
    with_our_names,
)
from lightrft.config.parts.data import (
    HeldOutOptions,
    LengthOptions,
    MediaOptions,
    PromptOptions,
    SourceOptions,
    SplitOptions,
    TemplateOptions,
)
from lightrft.config.parts.learning import (
    NO_REWARDS,
    LearningOptions,
    TeacherOptions,
)
from lightrft.config.parts.machine import (
    ENGINE_TYPES,
    BuildOptions,
    DistributedOptions,
    EngineChoiceOptions,
    EngineOptions,
)
from lightrft.config.parts.rollout import (
    DrawOptions,
    EnvironmentOptions,
    EpisodeOptions,
    RolloutOptions,
    TruncationOptions,
)
from lightrft.config.parts.rows import (
    PreferenceOptions,
    PromptDataOptions,
    RewardModelOptions,
    RowLengthOptions,
    RowRunOptions,
    SupervisedOptions,
    TrainedTokenOptions,
)
from lightrft.config.parts.run_control import (
    MonitoringOptions,
    OutputOptions,
    RecordOptions,
    RunControlOptions,
    StrictOptions,
)
from lightrft.config.parts.scores import (
    ModelOptions,
    RewardOptions,
    ScorerOptions,
)
from lightrft.config.parts.training import (
    ComputeOptions,
    HeadOptions,
    TrainingOptions,
    WeightOptions,
)
from lightrft.config.strategy_config import StrategyConfig
from lightrft.config.toml import read_toml, write_toml


# A whole run chooses its engine; the published default of a strategy is vllm.
@part("engine")
class PolicyOptions(
    OutputOptions,
    LearningOptions,
    RolloutOptions,
    PromptDataOptions,
    BuildOptions,
    StrategyConfig,
):
    """Options of reinforcement."""

    engine_type: str = option(
        "auto",
        "Rollout engine; auto takes vllm or sglang on a GPU, else hf.",
        choices=ENGINE_TYPES,
        common=True,
    )


def launch_problems(config: PolicyOptions, num_processes: int) -> list[str]:
    """Return the problems that every process of a launch has in common."""
    num_training = num_processes - config.rollout_ranks
    if num_training < 1:
        return [
            f"rollout_ranks {config.rollout_ranks} leaves no process to train: got "
            f"{num_processes} in all, expected {config.rollout_ranks + 1} or more"
        ]
    return batch_problems(config, num_training)


def batch_problems(config: PolicyOptions, world_size: int) -> list[str]:
    """Return sizes that do not fit together on `world_size` processes, one line per rule.

    A step samples rollout_batch_size * n_samples_per_prompt responses and updates once per
    train_batch_size of them; each process runs its share in micro-batches of
    micro_train_batch_size.
    """
    prompts, group_size = config.rollout_batch_size, config.n_samples_per_prompt
    samples, train = prompts * group_size, config.train_batch_size
    if world_size % config.sp_size:
        legal = _divisors(world_size)
        return [
            f"sp_size must divide the number of processes: got {config.sp_size} and {world_size}; "
            f"legal sp_size: {_either(legal)}"
        ]
    # Ranks that share their sequences share their samples.
    num_data_ranks = world_size // config.sp_size
    unit = config.micro_train_batch_size * num_data_ranks
    legal_train = [size for size in _divisors(samples) if size % unit == 0]
    problems = []
    size = min(config.fsdp_shard_size, world_size)
    if config.fsdp and size > 0 and world_size % size:
        problems.append(
            f"fsdp_shard_size must divide the number of processes: got {size} and {world_size}; "
            f"legal fsdp_shard_size: {_either(_divisors(world_size))}"
        )
    if config.adam_8bit and world_size > 1:
        problems.append(
            f"adam_8bit is for one process, blocks of shards have other scales: got {world_size}; "
            "leave it out, each process holds a part of Adam's moments"
        )
    problems += _engine_problems(config, config.rollout_ranks or world_size)
    if prompts % world_size:
        problems.append(
            f"rollout_batch_size must be a multiple of the {world_size} processes: got {prompts}; "
            f"nearest legal: {_either(_multiples(prompts, world_size))}"
        )
    if train % unit:
        remedies = _micro_remedies(config, samples, num_data_ranks)
        problems.append(
            "train_batch_size must be a multiple of micro_train_batch_size * processes: got "
            f"{train} and {config.micro_train_batch_size} * {num_data_ranks} = {unit}"
            f"{'; '.join(['', *remedies])}"
        )
    elif samples % train:
        legal_prompts = _multiples(
            prompts, math.lcm(train // math.gcd(train, group_size), world_size)
        )
        problems.append(
            "rollout_batch_size * n_samples_per_prompt must be a multiple of train_batch_size: got "
            f"{prompts} * {group_size} = {samples} samples and train_batch_size {train}; nearest "
            f"legal train_batch_size: {_either(_closest(legal_train, train))}; nearest legal "
            f"rollout_batch_size: {_either(legal_prompts)}"
        )
    return problems


def _micro_remedies(config: PolicyOptions, samples: int, ranks: int) -> list[str]:
    """Return the nearest sizes of updates and micro-batches that pass all rules."""
    train, micro = config.train_batch_size, config.micro_train_batch_size
    trains = [size for size in _divisors(samples) if size % ranks == 0]
    legal = {
        "micro_train_batch_size": _closest(_divisors(train // ranks), micro)
        if train in trains
        else [],
        "train_batch_size": _closest([e for e in trains if e % (micro * ranks) == 0], train),
    }
    remedies = [f"nearest legal {name}: {_either(sizes)}" for name, sizes in legal.items() if sizes]
    if remedies:
        return remedies
    nearest = _closest(trains, train)
    pairs = [f"{size} with {_closest(_divisors(size // ranks), micro)[0]}" for size in nearest]
    return [f"nearest legal pair of them: {' or '.join(pairs)}"] if pairs else []


def _engine_problems(config: PolicyOptions, generating: int) -> list[str]:
    """Return problems of the ranks with engines: the rollout ranks, if there are any."""
    problems, prompts = [], config.rollout_batch_size
    if generating % config.engine_tp_size:
        problems.append(
            "engine_tp_size must divide the number of processes: got "
            f"{config.engine_tp_size} and {generating}"
        )
    if config.rollout_ranks and prompts % generating:
        problems.append(
            f"rollout_batch_size must be a multiple of rollout_ranks: got {prompts} and "
            f"{generating}; nearest legal: {_either(_multiples(prompts, generating))}"
        )
    return problems


def _divisors(number: int) -> list[int]:
    """Return all divisors, ascending; of a number above 10**12, only those near its ends."""
    low = [size for size in range(1, min(math.isqrt(number), 10**6) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def _multiples(value: int, unit: int) -> list[int]:
    """Return the multiples of `unit` on both sides of `value`, without 0."""
    below = value // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def _closest(sizes: list[int], value: int) -> list[int]:
    """Return the neighbours of `value` in ascending `sizes`."""
    return [size for size in sizes if size <= value][-1:] + [s for s in sizes if s > value][:1]


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes)) if sizes else "none with the other sizes"


_ROW_SIZES = ("micro_train_batch_size", "micro_rollout_batch_size")


_ROWS = (
    TrainingOptions,
    WeightOptions,
    DistributedOptions,
    ModelOptions,
    SourceOptions,
    TemplateOptions,
    MediaOptions,
    RowLengthOptions,
    RunControlOptions,
    MonitoringOptions,
    StrictOptions,
)
_DISTILLED_ROWS = (*_ROWS, HeadOptions, TrainedTokenOptions, TeacherOptions)
# Distillation on rows has separate commands: with and without what the student samples.
DISTILLED_ROWS, DISTILLED_ROWS_AND_SAMPLES = "distill on rows", "distill on rows and samples"
PARTS: Mapping[str, tuple[type[object], ...]] = {
    "train": (PolicyOptions,),
    "sft": (*_ROWS, HeadOptions, SupervisedOptions),
    "prefer": (*_ROWS, HeadOptions, PreferenceOptions),
    "reward": (*_ROWS, RewardModelOptions),
    "distill": (PolicyOptions, RowLengthOptions, TrainedTokenOptions),
    DISTILLED_ROWS: _DISTILLED_ROWS,
    DISTILLED_ROWS_AND_SAMPLES: (*_DISTILLED_ROWS, EngineOptions, LengthOptions, DrawOptions),
    "eval": (
        ComputeOptions,
        EngineChoiceOptions,
        HeldOutOptions,
        PromptOptions,
        MediaOptions,
        TruncationOptions,
        EpisodeOptions,
        RewardOptions,
        RecordOptions,
    ),
    "data": (
        ModelOptions,
        SplitOptions,
        PromptOptions,
        MediaOptions,
        EnvironmentOptions,
        ScorerOptions,
    ),
}


def command_options(command: str) -> list[str]:
    """Return the names of the options that a command takes."""
    return [name for part in PARTS[command] for name in options_of(part)]


def is_training(command: str) -> bool:
    """Return whether a command trains a model."""
    return command in PARTS and "max_steps" in command_options(command)


def refusal(name: str, command: str) -> str:
    """Return the sentence about an option of another command."""
    other = next(each for each in PARTS if name in command_options(each))
    return f"{name} is an option of lightrft {other}, not of lightrft {command}"


@dataclass(kw_only=True)
class TrainConfig(RowRunOptions, PolicyOptions):
    """Options of `lightrft train` and of the trainers, checked alone and together.

    Raises:
        ConfigError: Values of wrong type, out of range or contradictory; one message lists all.
    """

    def refused_options(self, command: str) -> list[str]:
        """Return a line for each changed option that a command does not have."""
        taken = command_options(command)
        return [
            f"{refusal(name, command)}: leave it out"
            for name, (entry, _) in options_of(type(self)).items()
            if name not in taken and self.__dict__[name] != entry.default
        ]

    @property
    def missing_inputs(self) -> list[str]:
        """Return a line for each unset input that every run needs."""
        needed = (("pretrain", A_MODEL), ("prompt_data", A_DATA_FILE))
        return [
            f"--{name} is missing: {remedy}" for name, remedy in needed if vars(self)[name] is None
        ]

    def max_micro_tokens(self, micro_batch_size: int) -> int | None:
        """Return the bound of a micro-batch's tokens; None where rows are counted.

        Packed micro batches hold, by default, as many as `micro_batch_size` rows of full length.
        """
        if self.micro_batch_tokens is not None or not self.packing_samples:
            return self.micro_batch_tokens
        return micro_batch_size * self.max_episode_tokens

    def uncounted_tokens(self, num_shared: int) -> int:
        """Return how many tokens of a prefix that another row of a micro-batch holds count nothing.

        The others stand for its keys and values, which each row reads for itself.
        """
        return num_shared * 7 // 8 if self.shared_prefix != "off" else 0

    @property
    def sizes_in_rows(self) -> list[str]:
        """Return the micro_* options that somebody set: they count rows, nothing replaces them."""
        return [
            name
            for name in _ROW_SIZES
            if name in self.explicit or self.__dict__[name] != getattr(type(self), name)
        ]

    def check_world_size(self, world_size: int) -> None:
        """Check that the batch sizes fit together on `world_size` processes.

        Raises:
            ConfigError: They do not; the message shows all numbers and the nearest legal values.
        """
        problems = batch_problems(self, world_size)
        if problems:
            raise ConfigError("invalid configuration:\n  " + "\n  ".join(problems))

    def overlap_choices(self, num_processes: int) -> dict[str, int]:
        """Return the options that `overlap` sets, by name, without those that somebody set."""
        choices = {
            "stream": {"stream_chunk": -(-self.max_response_tokens // self.max_staleness)},
            "split": {"rollout_lag": 1, "rollout_ranks": num_processes // 2},
        }
        return {
            name: value
            for name, value in choices.get(self.overlap, {}).items()
            if name not in self.explicit and self.__dict__[name] == getattr(type(self), name)
        }

    def overlapped(self, num_processes: int) -> Self:
        """Return the options with the choices of `overlap`, unless somebody set them.

        Raises:
            ConfigError: The run cannot overlap in this way; a line for each reason.
        """
        chosen = self.overlap_choices(num_processes)
        if not chosen:
            return self
        if chosen.get("rollout_ranks") == 0:
            raise ConfigError("overlap split needs two processes or more: got 1")
        words = f"overlap {self.overlap} sets {', '.join(f'{n} {v}' for n, v in chosen.items())}"
        try:
            made = self.replaced(chosen)
        except ConfigError as error:
            lines = str(error).splitlines()[1:]
            raise ConfigError("\n".join(f"{words}: {line.strip()}" for line in lines)) from None
        said_once(words)
        return made

    def replaced(self, changes: Mapping[str, object], command: str = "train") -> Self:
        """Return the configuration with other values, checked anew.

        Args:
            changes: Values by name, also by equivalent names of other libraries.
            command: Command that would take them.

        Raises:
            TypeError: A name is no option; the message names the nearest.
            ConfigError: The values are wrong together.
        """
        known = options_of(type(self))
        ours, problems = with_our_names(changes, known, command)
        problems += [
            f"no option {name!r}{option_hint(name, known, command)}"
            for name in ours
            if name not in known
        ]
        if problems:
            raise TypeError("; ".join(problems))
        return type(self).from_args(
            {**self.__dict__, **ours, "explicit": self.explicit | ours.keys()}
        )

    def distilled(self) -> Self:
        """Return the options of a distillation: on samples, advantages are the teacher's alone.

        Raises:
            ConfigError: There is no teacher, or another advantage estimator was chosen.
        """
        if not self.teacher_places:
            raise ConfigError("--teacher is missing: give the folder of the model to learn from")
        if self.distillation_stage != "policy":
            return self
        chosen = self.advantage_estimator
        if chosen not in (NO_REWARDS, type(self).advantage_estimator):
            raise ConfigError(
                f"advantage_estimator: got {chosen!r}, and distillation has no advantage but the "
                "teacher's: leave it out, or give --teacher to lightrft train"
            )
        return self.replaced({"advantage_estimator": NO_REWARDS})

    def save(self, path: str | Path) -> None:
        """Write all options as TOML, except secrets and those that are None.

        Sizes of micro-batches that nobody set are left out: a run that begins from the file
        decides on them again.
        """
        write_toml(self, Path(path), {*_ROW_SIZES} - {*self.sizes_in_rows})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` or a user wrote; missing keys take their defaults.

        Raises:
            FileError: It cannot be read.
            ConfigError: It is not TOML, or holds unknown keys or wrong values.
        """
        known = options_of(cls)
        ours, problems = with_our_names(read_toml(Path(path)), known)
        config = cls.from_args({**ours, "explicit": frozenset(ours)})
        if problems or config.extra_args:
            lines = [f"{path}: {problem}" for problem in problems] + [
                f"{path}: unknown option {name!r}"
                + (TABLE_HINT if isinstance(value, Mapping) else option_hint(name, known))
                for name, value in config.extra_args.items()
            ]
            raise ConfigError("invalid configuration:\n  " + "\n  ".join(lines))
        return config

"""The one record of a training run, from which flags, TOML and help are derived."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lightrft.config.options import ConfigError, options_of
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
    TeacherOptions,
)
from lightrft.config.parts.machine import (
    DistributedOptions,
    EngineChoiceOptions,
    EngineOptions,
)
from lightrft.config.parts.rollout import (
    DrawOptions,
    EnvironmentOptions,
    EpisodeOptions,
    TruncationOptions,
)
from lightrft.config.parts.rows import (
    PreferenceOptions,
    RewardModelOptions,
    RowLengthOptions,
    RowRunOptions,
    SupervisedOptions,
    TrainedTokenOptions,
)
from lightrft.config.parts.run_control import (
    MonitoringOptions,
    RecordOptions,
    RunControlOptions,
    StrictOptions,
)
from lightrft.config.parts.scores import (
    ModelOptions,
    ScorerOptions,
    WeightedScorerOptions,
)
from lightrft.config.parts.training import (
    ComputeOptions,
    HeadOptions,
    TrainingOptions,
    WeightOptions,
)
from lightrft.config.policy_options import PolicyOptions, batch_problems
from lightrft.config.toml import read_toml, write_toml

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
        WeightedScorerOptions,
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

"""The parts of the options that each command has. Standard library only."""

from collections.abc import Mapping

from lightrft.config.options import options_of
from lightrft.config.parts.data import (
    HeldOutOptions,
    LengthOptions,
    MediaOptions,
    PromptOptions,
    SourceOptions,
    SplitOptions,
    TemplateOptions,
)
from lightrft.config.parts.learning import TeacherOptions
from lightrft.config.parts.machine import DistributedOptions, EngineChoiceOptions, EngineOptions
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
    SupervisedOptions,
    TrainedTokenOptions,
)
from lightrft.config.parts.run_control import (
    MonitoringOptions,
    RecordOptions,
    RunControlOptions,
    StrictOptions,
)
from lightrft.config.parts.scores import ModelOptions, ScorerOptions, WeightedScorerOptions
from lightrft.config.parts.training import (
    ComputeOptions,
    HeadOptions,
    TrainingOptions,
    WeightOptions,
)
from lightrft.config.rules import PolicyOptions

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
# Distillation on rows has commands of its own: with and without what the student samples.
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

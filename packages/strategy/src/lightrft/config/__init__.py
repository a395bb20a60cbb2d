"""The one record of options, the registries of choices, and TOML files. Standard library only."""

from lightrft.config.options import ConfigError
from lightrft.config.parts.data import (
    MediaOptions,
    OrderOptions,
    PromptOptions,
    RateOptions,
    SourceOptions,
    SplitOptions,
    TemplateOptions,
)
from lightrft.config.parts.learning import (
    AlgorithmOptions,
    LearningOptions,
    SampledTeacherOptions,
    TeacherOptions,
)
from lightrft.config.parts.machine import (
    BackendOptions,
    BuildOptions,
    DistributedOptions,
    EngineChoiceOptions,
    EngineOptions,
    MachineOptions,
)
from lightrft.config.parts.rollout import (
    EnvironmentOptions,
    EpisodeOptions,
    RolloutOptions,
    SamplingOptions,
    ScoringOptions,
    ShapingOptions,
    StreamingOptions,
)
from lightrft.config.parts.rows import (
    PreferenceOptions,
    PromptDataOptions,
    RewardModelOptions,
    RowDataOptions,
    RowLengthOptions,
    RowRunOptions,
)
from lightrft.config.parts.run_control import (
    AlarmOptions,
    FolderOptions,
    MonitoringOptions,
    OutputOptions,
    RunControlOptions,
)
from lightrft.config.parts.scores import ModelOptions, RewardOptions, ScorerOptions, ServiceOptions
from lightrft.config.parts.training import ComputeOptions, TrainingOptions
from lightrft.config.registry import register
from lightrft.config.strategy_config import StrategyConfig
from lightrft.config.train_config import TrainConfig

__all__ = [
    "AlarmOptions",
    "AlgorithmOptions",
    "BackendOptions",
    "BuildOptions",
    "ComputeOptions",
    "ConfigError",
    "DistributedOptions",
    "EngineChoiceOptions",
    "EngineOptions",
    "EnvironmentOptions",
    "EpisodeOptions",
    "FolderOptions",
    "LearningOptions",
    "MachineOptions",
    "MediaOptions",
    "ModelOptions",
    "MonitoringOptions",
    "OrderOptions",
    "OutputOptions",
    "PreferenceOptions",
    "PromptDataOptions",
    "PromptOptions",
    "RateOptions",
    "RewardModelOptions",
    "RewardOptions",
    "RolloutOptions",
    "RowDataOptions",
    "RowLengthOptions",
    "RowRunOptions",
    "RunControlOptions",
    "SampledTeacherOptions",
    "SamplingOptions",
    "ScorerOptions",
    "ScoringOptions",
    "ServiceOptions",
    "ShapingOptions",
    "SourceOptions",
    "SplitOptions",
    "StrategyConfig",
    "StreamingOptions",
    "TeacherOptions",
    "TemplateOptions",
    "TrainConfig",
    "TrainingOptions",
    "register",
]

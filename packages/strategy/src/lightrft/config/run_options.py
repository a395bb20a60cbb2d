"""The options of a whole run, beside those of its strategy."""

from dataclasses import dataclass

from lightrft.config.options import (
    EVAL,
    engine_option,
)
from lightrft.config.parts.algorithm import AlgorithmOptions
from lightrft.config.parts.engine import ENGINE_TYPES
from lightrft.config.parts.episodes import EpisodeOptions
from lightrft.config.parts.media import MediaOptions
from lightrft.config.parts.monitoring import MonitoringOptions
from lightrft.config.parts.preference import PreferenceOptions
from lightrft.config.parts.prompts import PromptOptions
from lightrft.config.parts.reward_models import RewardModelOptions
from lightrft.config.parts.rewards import RewardOptions
from lightrft.config.parts.run import RunControlOptions
from lightrft.config.parts.sampling import SamplingOptions
from lightrft.config.parts.sources import SourceOptions
from lightrft.config.parts.streaming import StreamingOptions
from lightrft.config.parts.supervised import SupervisedOptions
from lightrft.config.parts.teachers import TeacherOptions
from lightrft.config.parts.weights import WeightOptions
from lightrft.config.strategy_config import StrategyConfig


@dataclass(kw_only=True)
class RunOptions(
    MonitoringOptions,
    RunControlOptions,
    RewardModelOptions,
    PreferenceOptions,
    SupervisedOptions,
    TeacherOptions,
    AlgorithmOptions,
    RewardOptions,
    EpisodeOptions,
    StreamingOptions,
    SamplingOptions,
    WeightOptions,
    MediaOptions,
    PromptOptions,
    SourceOptions,
    StrategyConfig,
):
    """Options of `TrainConfig` beside those of a strategy; rules and methods are there."""

    engine_type: str = engine_option(
        "auto",
        "Rollout engine; auto takes vllm or sglang on a GPU, else hf.",
        choices=ENGINE_TYPES,
        common=True,
        commands=EVAL,
    )

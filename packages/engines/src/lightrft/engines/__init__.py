"""Rollout engines: generators of completions whose weights a trainer replaces between calls."""

from typing import TYPE_CHECKING

from lightrft.kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lightrft.engines.base import (
        RolloutEngine as RolloutEngine,
        StaleEngineError as StaleEngineError,
    )
    from lightrft.engines.factory import (
        build_engine as build_engine,
        resolve_engine_type as resolve_engine_type,
    )
    from lightrft.engines.types import (
        Completion as Completion,
        EngineConfig as EngineConfig,
        EngineParameter as EngineParameter,
        EngineStatus as EngineStatus,
        FinishReason as FinishReason,
        GenerationRequest as GenerationRequest,
        LogprobsMode as LogprobsMode,
        MultiModalInputs as MultiModalInputs,
        SamplingParams as SamplingParams,
    )
    from lightrft.kernels.weight_bucket.layout import WeightPiece as WeightPiece

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

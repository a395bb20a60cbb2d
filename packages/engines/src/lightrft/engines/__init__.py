"""Rollout engines: generators of completions whose weights a trainer replaces between calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lightrft.engines.base import (
        RolloutEngine as RolloutEngine,
    )
    from lightrft.engines.base import (
        StaleEngineError as StaleEngineError,
    )
    from lightrft.engines.factory import (
        build_engine as build_engine,
    )
    from lightrft.engines.factory import (
        resolve_engine_type as resolve_engine_type,
    )
    from lightrft.engines.types import (
        Completion as Completion,
    )
    from lightrft.engines.types import (
        EngineConfig as EngineConfig,
    )
    from lightrft.engines.types import (
        EngineParameter as EngineParameter,
    )
    from lightrft.engines.types import (
        EngineStatus as EngineStatus,
    )
    from lightrft.engines.types import (
        FinishReason as FinishReason,
    )
    from lightrft.engines.types import (
        GenerationRequest as GenerationRequest,
    )
    from lightrft.engines.types import (
        LogprobsMode as LogprobsMode,
    )
    from lightrft.engines.types import (
        MultiModalInputs as MultiModalInputs,
    )
    from lightrft.engines.types import (
        SamplingParams as SamplingParams,
    )
    from lightrft.engines.types import (
        WeightPiece as WeightPiece,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

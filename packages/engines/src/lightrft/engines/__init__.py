"""Rollout engines: generators of completions whose weights a trainer replaces between calls."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.engines.base import RolloutEngine, StaleEngineError
    from lightrft.engines.factory import build_engine, resolve_engine_type
    from lightrft.engines.types import (
        Completion,
        EngineConfig,
        EngineParameter,
        EngineStatus,
        FinishReason,
        GenerationRequest,
        LogprobsMode,
        MultiModalInputs,
        SamplingParams,
        WeightPiece,
    )

__all__ = [
    "Completion",
    "EngineConfig",
    "EngineParameter",
    "EngineStatus",
    "FinishReason",
    "GenerationRequest",
    "LogprobsMode",
    "MultiModalInputs",
    "RolloutEngine",
    "SamplingParams",
    "StaleEngineError",
    "WeightPiece",
    "build_engine",
    "resolve_engine_type",
]

_MODULES = {
    "Completion": "types",
    "EngineConfig": "types",
    "EngineParameter": "types",
    "EngineStatus": "types",
    "FinishReason": "types",
    "GenerationRequest": "types",
    "LogprobsMode": "types",
    "MultiModalInputs": "types",
    "RolloutEngine": "base",
    "SamplingParams": "types",
    "StaleEngineError": "base",
    "WeightPiece": "types",
    "build_engine": "factory",
    "resolve_engine_type": "factory",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

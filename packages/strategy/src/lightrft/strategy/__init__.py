"""Training strategies: DeepSpeed ZeRO, FSDP2 and a single process behind one interface."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.engines.types import EngineStatus
    from lightrft.strategy.config import StrategyConfig
    from lightrft.strategy.factory import get_strategy
    from lightrft.strategy.fake import FakeStrategy, get_fake_strategy
    from lightrft.strategy.strategy_base import PreparedModel, StrategyBase, is_engine

_MODULES = {
    "EngineStatus": "lightrft.engines.types",
    "FakeStrategy": "lightrft.strategy.fake",
    "PreparedModel": "lightrft.strategy.strategy_base",
    "StrategyBase": "lightrft.strategy.strategy_base",
    "StrategyConfig": "lightrft.strategy.config",
    "get_fake_strategy": "lightrft.strategy.fake",
    "get_strategy": "lightrft.strategy.factory",
    "is_engine": "lightrft.strategy.strategy_base",
}

__all__ = [
    "EngineStatus",
    "FakeStrategy",
    "PreparedModel",
    "StrategyBase",
    "StrategyConfig",
    "get_fake_strategy",
    "get_strategy",
    "is_engine",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(importlib.import_module(_MODULES[name]))[name]


def __dir__() -> list[str]:
    return __all__

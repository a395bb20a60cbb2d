"""Rewards: rules for mathematics, and functions of a user's Python file.

A reward sees the response alone as text, never the prompt's part of the token sequence. Code that
may hang or crash runs in worker processes with a deadline. That contains accidents; it is not a
sandbox against malicious code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.rewards.build import REWARDS as REWARDS
    from lightrft.rewards.build import CombinedReward as CombinedReward
    from lightrft.rewards.build import RewardSettings as RewardSettings
    from lightrft.rewards.build import build_reward as build_reward
    from lightrft.rewards.errors import RewardError as RewardError
    from lightrft.rewards.math_rules import MathReward as MathReward
    from lightrft.rewards.types import RewardFunction as RewardFunction
    from lightrft.rewards.types import RewardResult as RewardResult

_MODULES = {
    "CombinedReward": "build",
    "MathReward": "math_rules",
    "REWARDS": "build",
    "RewardError": "errors",
    "RewardFunction": "types",
    "RewardResult": "types",
    "RewardSettings": "build",
    "build_reward": "build",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

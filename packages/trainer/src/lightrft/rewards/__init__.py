"""Rewards: rules for mathematics, and functions of a user's Python file.

A reward sees the response alone as text, never the prompt's part of the token sequence. Code that
may hang or crash runs in worker processes with a deadline. That contains accidents; it is not a
sandbox against malicious code.
"""

from typing import TYPE_CHECKING

from lightrft.kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lightrft.rewards.build import (
        CombinedReward as CombinedReward,
        build_reward as build_reward,
    )
    from lightrft.rewards.types import (
        RewardError as RewardError,
        RewardFunction as RewardFunction,
        RewardResult as RewardResult,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

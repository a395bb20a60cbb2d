"""Losses, advantages, KL and aggregation as pure functions of tensors.

Nothing here logs, talks to other processes or moves tensors between devices. All per-token
tensors are [batch, seq]; `response_mask` marks sampled tokens. See `lightrft.algorithms.advantages`
and `lightrft.algorithms.aggregation` for how the pieces fit together over ranks and micro-batches.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.algorithms.advantages import ADVANTAGE_ESTIMATORS as ADVANTAGE_ESTIMATORS
    from lightrft.algorithms.advantages import (
        build_advantage_estimator as build_advantage_estimator,
    )
    from lightrft.algorithms.advantages import estimate_row_advantages as estimate_row_advantages
    from lightrft.algorithms.advantages import (
        estimate_token_advantages as estimate_token_advantages,
    )
    from lightrft.algorithms.advantages import get_advantage_estimator as get_advantage_estimator
    from lightrft.algorithms.advantages import spread_row_advantages as spread_row_advantages
    from lightrft.algorithms.advantages.types import AdvantageEstimator as AdvantageEstimator
    from lightrft.algorithms.advantages.types import RowAdvantageInputs as RowAdvantageInputs
    from lightrft.algorithms.advantages.types import TokenAdvantageInputs as TokenAdvantageInputs
    from lightrft.algorithms.aggregation import AGGREGATIONS as AGGREGATIONS
    from lightrft.algorithms.aggregation import aggregate as aggregate
    from lightrft.algorithms.aggregation import local_normalizer as local_normalizer
    from lightrft.algorithms.aggregation import loss_weights as loss_weights
    from lightrft.algorithms.corrections import CORRECTIONS as CORRECTIONS
    from lightrft.algorithms.corrections import correction_weights as correction_weights
    from lightrft.algorithms.kl import KL_ESTIMATORS as KL_ESTIMATORS
    from lightrft.algorithms.kl import AdaptiveKlController as AdaptiveKlController
    from lightrft.algorithms.kl import FixedKlController as FixedKlController
    from lightrft.algorithms.kl import estimate_kl as estimate_kl
    from lightrft.algorithms.masking import Moments as Moments
    from lightrft.algorithms.masking import masked_moments as masked_moments
    from lightrft.algorithms.masking import whiten as whiten
    from lightrft.algorithms.policy import POLICY_LOSSES as POLICY_LOSSES
    from lightrft.algorithms.policy import PolicyLoss as PolicyLoss
    from lightrft.algorithms.policy import build_policy_loss as build_policy_loss
    from lightrft.algorithms.policy import get_policy_loss as get_policy_loss
    from lightrft.algorithms.returns import TokenAdvantages as TokenAdvantages
    from lightrft.algorithms.returns import token_rewards as token_rewards
    from lightrft.algorithms.shaping import RunningMoments as RunningMoments
    from lightrft.algorithms.shaping import overlong_penalty as overlong_penalty
    from lightrft.algorithms.types import TokenLoss as TokenLoss
    from lightrft.algorithms.value import clipped_value_loss as clipped_value_loss

_MODULES = {
    "ADVANTAGE_ESTIMATORS": "advantages",
    "AGGREGATIONS": "aggregation",
    "AdaptiveKlController": "kl",
    "AdvantageEstimator": "advantages.types",
    "CORRECTIONS": "corrections",
    "FixedKlController": "kl",
    "KL_ESTIMATORS": "kl",
    "Moments": "masking",
    "POLICY_LOSSES": "policy",
    "PolicyLoss": "policy",
    "RowAdvantageInputs": "advantages.types",
    "RunningMoments": "shaping",
    "TokenAdvantageInputs": "advantages.types",
    "TokenAdvantages": "returns",
    "TokenLoss": "types",
    "aggregate": "aggregation",
    "build_advantage_estimator": "advantages",
    "build_policy_loss": "policy",
    "clipped_value_loss": "value",
    "correction_weights": "corrections",
    "estimate_kl": "kl",
    "estimate_row_advantages": "advantages",
    "estimate_token_advantages": "advantages",
    "get_advantage_estimator": "advantages",
    "get_policy_loss": "policy",
    "local_normalizer": "aggregation",
    "loss_weights": "aggregation",
    "masked_moments": "masking",
    "overlong_penalty": "shaping",
    "spread_row_advantages": "advantages",
    "token_rewards": "returns",
    "whiten": "masking",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

"""Losses, advantages, KL and aggregation as pure functions of tensors.

Nothing here logs, talks to other processes or moves tensors between devices. All per-token
tensors are [batch, seq]; `response_mask` marks sampled tokens. See `lightrft.algorithms.advantages`
and `lightrft.algorithms.aggregation` for how the pieces fit together over ranks and micro-batches.
"""

from __future__ import annotations

import importlib

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

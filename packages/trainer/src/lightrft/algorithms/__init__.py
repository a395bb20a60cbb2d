"""Losses, advantages, KL and aggregation as pure functions of tensors.

Nothing here logs, talks to other processes or moves tensors between devices. All per-token
tensors are [batch, seq]; `response_mask` marks sampled tokens. See `lightrft.algorithms.advantages`
and `lightrft.algorithms.aggregation` for how the pieces fit together over ranks and micro-batches.

Here is what the author of a policy loss or an advantage estimator needs, without importing torch;
everything else is imported from its module.
"""

from lightrft.algorithms.interface import (
    RowAdvantageInputs,
    TokenAdvantageInputs,
    TokenAdvantages,
    TokenLoss,
    advantage_estimator,
    policy_loss,
)

__all__ = [
    "RowAdvantageInputs",
    "TokenAdvantageInputs",
    "TokenAdvantages",
    "TokenLoss",
    "advantage_estimator",
    "policy_loss",
]

"""What estimators take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightrft.algorithms.returns import TokenAdvantages

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowAdvantageInputs:
    """The rows of one step over all ranks, the same on every rank.

    Args:
        rewards: [rows].
        group_ids: [rows] int64; rows of one prompt share it. Any order.
        lengths: [rows] int64, response tokens.
        greedy_rewards: [rows] reward of the greedy completion of the row's prompt; ReMax only.
        is_scored: [rows] bool, False where the reward is missing: such a row gets 0 and its group
            does without it. None: all are scored.
    """

    rewards: Tensor
    group_ids: Tensor
    lengths: Tensor
    greedy_rewards: Tensor | None = None
    is_scored: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenAdvantageInputs:
    """Rows of one rank.

    Args:
        token_rewards: [batch, seq], see `returns.token_rewards`.
        response_mask: [batch, seq] bool.
        values: [batch, seq] of the critic, or None without one.
        gamma: Discount per sampled token.
        lambd: Of generalised advantage estimation.
    """

    token_rewards: Tensor
    response_mask: Tensor
    values: Tensor | None = None
    gamma: float = 1.0
    lambd: float = 0.95


RowEstimator = Callable[..., "Tensor"]
"""(RowAdvantageInputs, **options) -> [rows]."""

TokenEstimator = Callable[[TokenAdvantageInputs], TokenAdvantages]


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """One named estimator: exactly one of `rows` and `tokens` is set.

    Args:
        rows: Outcome estimator over the rows of all ranks.
        tokens: Token-level estimator over the rows of one rank.
        needs_groups: Every prompt must have at least two completions.
        needs_critic: `TokenAdvantageInputs.values` must be given.
        needs_greedy_rewards: `RowAdvantageInputs.greedy_rewards` must be given.
        whitens: The result is to be whitened once, with moments over all tokens of all ranks.
        options: Name and default of the keyword arguments of `rows`.
    """

    rows: RowEstimator | None = None
    tokens: TokenEstimator | None = None
    needs_groups: bool = False
    needs_critic: bool = False
    needs_greedy_rewards: bool = False
    whitens: bool = False
    options: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def is_token_level(self) -> bool:
        """It works on token rewards of local rows, not on one reward per global row."""
        return self.tokens is not None

"""Advantage estimators by name.

Outcome estimators need every completion of a prompt, which may sit on several ranks, so they work
on the rows of *all* ranks and give one number per row. Token-level estimators work on local rows.
Neither normalises over the batch; the caller does so once, with moments over all ranks, where
`estimator.whitens` says so:

    estimator = build_advantage_estimator(name, options)
    if estimator.is_token_level:
        rewards_bt = token_rewards(rewards, mask, kl=kl, kl_coef=coef)            # local rows
        result = estimate_token_advantages(estimator, TokenAdvantageInputs(rewards_bt, mask, ...))
    else:
        rows = estimate_row_advantages(estimator, RowAdvantageInputs(...))        # global rows
        result = spread_row_advantages(rows[mine], mask, kl=kl, kl_coef=coef)     # local rows
    if estimator.whitens:
        sums = all_reduce(masked_moments(result.advantages, mask).sums)           # the caller's
        moments = Moments(sums)
        advantages = whiten(result.advantages, mask, moments.mean, moments.std())
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lightrft.algorithms.advantages.cpgd import cpgd_advantages
from lightrft.algorithms.advantages.group_norm import (
    group_centred_advantages,
    group_norm_advantages,
)
from lightrft.algorithms.advantages.opo import opo_advantages
from lightrft.algorithms.advantages.remax import remax_advantages
from lightrft.algorithms.advantages.rloo import rloo_advantages
from lightrft.algorithms.advantages.token_level import (
    gae_token_advantages,
    return_token_advantages,
)
from lightrft.algorithms.advantages.types import AdvantageEstimator
from lightrft.algorithms.lookup import lookup, reject_unknown_options
from lightrft.algorithms.returns import TokenAdvantages, discounted_returns, token_rewards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from lightrft.algorithms.advantages.types import RowAdvantageInputs, TokenAdvantageInputs

_GROUP_NORM = AdvantageEstimator(
    rows=group_norm_advantages, needs_groups=True, options={"eps": 1e-6}
)
_REINFORCE_PP = AdvantageEstimator(tokens=return_token_advantages, whitens=True)

ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "gae": AdvantageEstimator(tokens=gae_token_advantages, needs_critic=True, whitens=True),
    "reinforce": AdvantageEstimator(tokens=return_token_advantages),
    "reinforce++": _REINFORCE_PP,
    "reinforce_baseline": AdvantageEstimator(
        rows=group_centred_advantages, needs_groups=True, whitens=True
    ),
    "rloo": AdvantageEstimator(rows=rloo_advantages, needs_groups=True),
    "group_norm": _GROUP_NORM,
    "grpo": _GROUP_NORM,
    "dr_grpo": AdvantageEstimator(rows=group_centred_advantages, needs_groups=True),
    "cpgd": AdvantageEstimator(
        rows=cpgd_advantages, needs_groups=True, options={"weighting": "std"}
    ),
    "opo": AdvantageEstimator(rows=opo_advantages, needs_groups=True),
    "remax": AdvantageEstimator(rows=remax_advantages, needs_greedy_rewards=True),
}


def get_advantage_estimator(name: str) -> AdvantageEstimator:
    """The entry of `ADVANTAGE_ESTIMATORS`; an unknown name is a ValueError that lists all."""
    return lookup(ADVANTAGE_ESTIMATORS, name, kind="advantage estimator")


def build_advantage_estimator(
    name: str, options: Mapping[str, float | str | None]
) -> AdvantageEstimator:
    """The named estimator with its options bound.

    Args:
        name: A name in `ADVANTAGE_ESTIMATORS`.
        options: By name; None means the estimator's own default.

    Raises:
        ValueError: unknown name, or a value (not None) for an option the estimator does not have.
    """
    entry = get_advantage_estimator(name)
    given = {option: value for option, value in options.items() if value is not None}
    reject_unknown_options(given, entry.options, owner=f"advantage estimator {name!r}")
    if entry.rows is None:
        return entry
    bound = {**entry.options, **given}
    return replace(entry, rows=partial(entry.rows, **bound), options=bound)


def estimate_row_advantages(estimator: AdvantageEstimator, inputs: RowAdvantageInputs) -> Tensor:
    """One advantage per row of all ranks: [rows]; needs an outcome estimator."""
    if estimator.rows is None:
        raise ValueError("this estimator is token-level: call estimate_token_advantages")
    return estimator.rows(inputs)


def estimate_token_advantages(
    estimator: AdvantageEstimator, inputs: TokenAdvantageInputs
) -> TokenAdvantages:
    """Advantages and returns of local rows; needs a token-level estimator."""
    if estimator.tokens is None:
        raise ValueError("this estimator works on rows: call estimate_row_advantages")
    return estimator.tokens(inputs)


def spread_row_advantages(
    row_advantages: Tensor,
    response_mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
) -> TokenAdvantages:
    """Row advantages as tokens': A_t = gamma^(steps to the end) A_i - kl_coef sum_{s>=t} kl_s.

    Without a KL penalty and with gamma = 1 every response token of a row gets the row's number.

    Args:
        row_advantages: [batch], local rows.
        response_mask: [batch, seq] bool.
        kl, kl_coef: Per-token KL penalty in the reward, see `returns.token_rewards`.
        gamma: Discount per sampled token.
    """
    shaped = token_rewards(row_advantages, response_mask, kl=kl, kl_coef=kl_coef)
    returns = discounted_returns(shaped, response_mask, gamma=gamma)
    return TokenAdvantages(advantages=returns, returns=returns)

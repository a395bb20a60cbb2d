"""Estimators on token rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.algorithms.returns import (
    TokenAdvantages,
    discounted_returns,
    generalized_advantages,
)

if TYPE_CHECKING:
    from lightrft.algorithms.advantages.types import TokenAdvantageInputs


def gae_token_advantages(inputs: TokenAdvantageInputs) -> TokenAdvantages:
    """Generalised advantage estimation with a critic; see `returns.generalized_advantages`.

    Raises:
        ValueError: `values` is missing.
    """
    if inputs.values is None:
        raise ValueError("the gae estimator needs the critic's values")
    return generalized_advantages(
        inputs.token_rewards,
        inputs.values,
        inputs.response_mask,
        gamma=inputs.gamma,
        lambd=inputs.lambd,
    )


def return_token_advantages(inputs: TokenAdvantageInputs) -> TokenAdvantages:
    """REINFORCE and REINFORCE++: the advantage is the discounted return of the token rewards."""
    returns = discounted_returns(inputs.token_rewards, inputs.response_mask, gamma=inputs.gamma)
    return TokenAdvantages(advantages=returns, returns=returns)

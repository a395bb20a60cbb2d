"""What a policy loss or an advantage estimator declares beside its signature.

Its hyper-parameters are the keyword-only arguments of the function. What a caller must know
besides is declared by a decorator, which leaves the function as it is:

    @policy_loss(aggregation="token-mean")
    def my_loss(logprobs, old_logprobs, advantages, response_mask, *, clip: float = 0.2): ...

    policy_loss_traits(my_loss).aggregation    # also of functools.partial(my_loss, clip=0.3)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])
Traits = TypeVar("Traits", "PolicyLossTraits", "AdvantageTraits")


class _Declaration:
    """A decorator that attaches itself to a function and returns that function."""

    __slots__ = ()

    def __call__(self, function: Function) -> Function:
        vars(function)["lightrft_traits"] = self
        return function


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossTraits(_Declaration):
    """What a policy loss declares; the defaults hold for a function without a declaration.

    Args:
        aggregation: The mode of `aggregation.AGGREGATIONS` that makes it the paper's objective.
        is_sequence_level: One ratio per row; a token-level aggregation changes the objective.
        couples_rows: The loss of a token depends on the other rows of the same call, so that the
            step depends on how the optimizer batch is cut into micro-batches.
        is_token_wise: The loss of a token depends on that token's numbers alone: it may be computed
            for some tokens at a time, inside the output projection.
    """

    aggregation: str = "seq-mean-token-mean"
    is_sequence_level: bool = False
    couples_rows: bool = False
    is_token_wise: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageTraits(_Declaration):
    """What an advantage estimator declares; the defaults hold without a declaration.

    Args:
        is_token_level: It takes `TokenAdvantageInputs` of local rows and gives `TokenAdvantages`;
            otherwise `RowAdvantageInputs` of the rows of all ranks, and gives one number a row.
        needs_groups: Every prompt must have at least two completions.
        needs_critic: `TokenAdvantageInputs.values` must be given.
        needs_greedy_rewards: `RowAdvantageInputs.greedy_rewards` must be given.
        whitens: The result is to be whitened once, with moments over all tokens of all ranks.
    """

    is_token_level: bool = False
    needs_groups: bool = False
    needs_critic: bool = False
    needs_greedy_rewards: bool = False
    whitens: bool = False


# The decorator's name.
policy_loss = PolicyLossTraits
# The decorator's name.
advantage_estimator = AdvantageTraits


def policy_loss_traits(function: Callable[..., object]) -> PolicyLossTraits:
    """What the policy loss declares, or the defaults."""
    return _traits(function, PolicyLossTraits())


def advantage_traits(function: Callable[..., object]) -> AdvantageTraits:
    """What the advantage estimator declares, or the defaults."""
    return _traits(function, AdvantageTraits())


def _traits(function: Callable[..., object], default: Traits) -> Traits:
    while isinstance(function, partial) and "lightrft_traits" not in vars(function):
        function = function.func
    found = getattr(function, "lightrft_traits", default)
    if not isinstance(found, type(default)):
        raise TypeError(
            f"{function} is declared as {type(found).__name__}: expected {type(default).__name__}"
        )
    return found

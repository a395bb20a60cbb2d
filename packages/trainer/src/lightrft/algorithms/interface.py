"""Interface of losses and advantage estimators: inputs, results and traits.

The hyper-parameters of a loss or an estimator are the keyword-only arguments of the function. What
a caller must know besides are its traits, declared by a decorator that leaves the function as it
is:

    @policy_loss(aggregation="token-mean")
    def my_loss(logprobs, old_logprobs, advantages, response_mask, *, clip: float = 0.2): ...

    policy_loss_traits(my_loss).aggregation    # also of functools.partial(my_loss, clip=0.3)
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


Function = TypeVar("Function", bound=Callable[..., object])
Traits = TypeVar("Traits", "PolicyLossTraits", "AdvantageTraits", "PreferenceLossTraits")


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """One loss value per token, to be minimised, and what is worth counting.

    Everything is 0 or False outside the response mask; only `loss` carries a gradient.

    Args:
        loss: [batch, seq] float32 (float64 for float64 logprobs).
        ratio: [batch, seq] importance ratio to the old policy that the loss used: per token, or
            one number per row for sequence-level losses.
        is_clipped_low: [batch, seq] bool, the lower clip bound acted on the token.
        is_clipped_high: [batch, seq] bool, the upper one (the dual clip's included) did.
        is_clamped: [batch, seq] bool, the log of `ratio` exceeded 20 in size and was held there.
    """

    loss: Tensor
    ratio: Tensor
    is_clipped_low: Tensor
    is_clipped_high: Tensor
    is_clamped: Tensor

    @classmethod
    def unclipped(
        cls, loss: Tensor, ratio: Tensor, response_mask: Tensor, is_clamped: Tensor | None = None
    ) -> TokenLoss:
        """Return a loss without clipping; `loss` and `ratio` count inside the mask only."""
        never = response_mask & ~response_mask
        ratio = ratio.detach().masked_fill(~response_mask, 0.0)
        loss = loss.masked_fill(~response_mask, 0.0)
        return cls(loss, ratio, never, never, never if is_clamped is None else is_clamped)

    def weighted(self, weights: Tensor) -> TokenLoss:
        """Return the loss times detached [batch, seq] weights: off-policy corrections, keep-masks.

        Only the numerator of the aggregation changes; Z still counts the response mask.
        """
        return replace(self, loss=self.loss * weights.detach().to(self.loss.dtype))


@dataclass(frozen=True, slots=True)
class RowAdvantageInputs:
    """The rows of one step over all ranks, the same on every rank.

    Args:
        rewards: [rows].
        group_ids: [rows] int64; rows of one prompt share it. Any order.
        lengths: [rows] int64, sampled tokens.
        greedy_rewards: [rows] reward of the greedy completion of the row's prompt; ReMax only.
        is_scored: [rows] bool, False where the reward is missing: such a row gets 0 and its group
            does without it. None: all are scored.
        components: By name, [rows] parts of the reward, NaN where a row has none.
    """

    rewards: Tensor
    group_ids: Tensor
    lengths: Tensor
    greedy_rewards: Tensor | None = None
    is_scored: Tensor | None = None
    components: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenAdvantageInputs:
    """Rows of one rank.

    Args:
        token_rewards: [batch, seq], see `returns.token_rewards`.
        response_mask: [batch, seq] bool.
        values: [batch, seq] of the critic, or None without one.
        gamma: Discount per sampled token; a tensor [batch, seq] holds that between each token and
            the next sampled one.
        lambd: Lambda of generalised advantage estimation.
    """

    token_rewards: Tensor
    response_mask: Tensor
    values: Tensor | None = None
    gamma: float | Tensor = 1.0
    lambd: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages before whitening, and the returns a critic learns.

    Args:
        advantages: [batch, seq], 0 outside the response mask.
        returns: [batch, seq], 0 outside the response mask.
    """

    advantages: Tensor
    returns: Tensor


# (logprobs, old_logprobs, advantages, response_mask), each [batch, seq]; options are bound.
PolicyLossFunction = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], TokenLoss]

# RowAdvantageInputs -> [rows] or TokenAdvantageInputs -> TokenAdvantages; options are bound.
AdvantageFunction = Callable[..., "Tensor | TokenAdvantages"]


class _Declaration:
    """A decorator that attaches itself to a function and returns that function."""

    __slots__ = ()

    def __call__(self, function: Function) -> Function:
        vars(function)["lightrft_traits"] = self
        return function


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossTraits(_Declaration):
    """Traits of a policy loss; the defaults hold for a function without a declaration.

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
    """Traits of an advantage estimator; the defaults hold without a declaration.

    Args:
        is_token_level: It takes `TokenAdvantageInputs` of local rows and gives `TokenAdvantages`;
            otherwise `RowAdvantageInputs` of the rows of all ranks, and gives one number a row.
        needs_groups: Every prompt must have at least two completions.
        needs_critic: It requires `TokenAdvantageInputs.values`.
        needs_greedy_rewards: It requires `RowAdvantageInputs.greedy_rewards`.
        whitens: The result is to be whitened once, with moments over all tokens of all ranks.
        reads_components: It reads `RowAdvantageInputs.components`, which no shaping changes.
    """

    is_token_level: bool = False
    needs_groups: bool = False
    needs_critic: bool = False
    needs_greedy_rewards: bool = False
    whitens: bool = False
    reads_components: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLossTraits(_Declaration):
    """Traits of a preference loss; the defaults hold for a function without a declaration.

    Args:
        uses_reference: It reads the logprobs of the reference.
        is_per_token: Answers are compared by means over their tokens.
        is_of_answers: It gives one loss per answer instead of one per pair, those of `chosen`
            first: labelled answers without a partner will do.
        couples_pairs: The loss of a pair depends on the other pairs of the step.
        uses_kl: It reads `PreferenceSums.kl`.
    """

    uses_reference: bool = True
    is_per_token: bool = False
    is_of_answers: bool = False
    couples_pairs: bool = False
    uses_kl: bool = False


# The decorator's name.
policy_loss = PolicyLossTraits
# The decorator's name.
advantage_estimator = AdvantageTraits
# The decorator's name.
preference_loss = PreferenceLossTraits


def policy_loss_traits(function: Callable[..., object]) -> PolicyLossTraits:
    """Return the declared traits of a policy loss, or the defaults."""
    return _traits(function, PolicyLossTraits())


def advantage_traits(function: Callable[..., object]) -> AdvantageTraits:
    """Return the declared traits of an advantage estimator, or the defaults."""
    return _traits(function, AdvantageTraits())


def preference_loss_traits(function: Callable[..., object]) -> PreferenceLossTraits:
    """Return the declared traits of a preference loss, or the defaults."""
    return _traits(function, PreferenceLossTraits())


def _traits(function: Callable[..., object], default: Traits) -> Traits:
    while isinstance(function, partial) and "lightrft_traits" not in vars(function):
        function = function.func
    traits = getattr(function, "lightrft_traits", default)
    if not isinstance(traits, type(default)):
        raise TypeError(
            f"{function} is declared as {type(traits).__name__}: expected {type(default).__name__}"
        )
    return traits


Entry = TypeVar("Entry")


def lookup(registry: Mapping[str, Entry], name: str, *, kind: str) -> Entry:
    """Return the entry called `name`.

    Raises:
        ValueError: no such name; the message lists all names and the nearest one.
    """
    if name in registry:
        return registry[name]
    nearest = difflib.get_close_matches(name.lower(), list(registry), n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    known = ", ".join(sorted(registry))
    raise ValueError(f"unknown {kind} {name!r}: expected one of {known}{hint}")

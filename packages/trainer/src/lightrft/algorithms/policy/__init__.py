"""Policy losses by name, with the options and the aggregation of their papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from lightrft.algorithms.lookup import lookup, reject_unknown_options
from lightrft.algorithms.policy.cispo import cispo_policy_loss
from lightrft.algorithms.policy.clipped import clipped_policy_loss
from lightrft.algorithms.policy.cpgd import cpgd_policy_loss
from lightrft.algorithms.policy.gmpo import gmpo_policy_loss
from lightrft.algorithms.policy.gspo import gspo_policy_loss, gspo_token_policy_loss
from lightrft.algorithms.policy.reinforce import reinforce_policy_loss
from lightrft.algorithms.policy.sapo import sapo_policy_loss
from lightrft.algorithms.types import TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.algorithms.aggregation import AggregationMode

PolicyLossFunction = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], TokenLoss]
"""(logprobs, old_logprobs, advantages, response_mask), each [batch, seq] -> TokenLoss."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """One named policy loss.

    Args:
        function: The loss; its keyword-only arguments are the keys of `options`.
        aggregation: The mode that makes it the paper's objective.
        options: Name and default of every hyper-parameter.
        is_sequence_level: One ratio per row; token-level aggregation changes the objective.
    """

    function: Callable[..., TokenLoss]
    aggregation: AggregationMode
    options: Mapping[str, float | None] = field(default_factory=dict)
    is_sequence_level: bool = False


_CLIPPED = PolicyLoss(
    clipped_policy_loss,
    "seq-mean-token-mean",
    {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
)

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clipped": _CLIPPED,
    "ppo": _CLIPPED,
    "dapo": PolicyLoss(
        clipped_policy_loss,
        "token-mean",
        {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    ),
    "dr_grpo": PolicyLoss(
        clipped_policy_loss,
        "seq-mean-token-sum-norm",
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    ),
    "gspo": PolicyLoss(
        gspo_policy_loss,
        "seq-mean-token-mean",
        {"clip_low": 3e-4, "clip_high": 4e-4},
        is_sequence_level=True,
    ),
    "gspo-token": PolicyLoss(
        gspo_token_policy_loss,
        "seq-mean-token-mean",
        {"clip_low": 3e-4, "clip_high": 4e-4},
        is_sequence_level=True,
    ),
    "gmpo": PolicyLoss(
        gmpo_policy_loss,
        "seq-mean-token-mean",
        {"max_log_ratio": 0.4},
        is_sequence_level=True,
    ),
    "cpgd": PolicyLoss(
        cpgd_policy_loss,
        "seq-mean-token-mean",
        {"clip_low": 0.2, "clip_high": 0.2, "drift_coef": 0.001, "drift_cap": 2.0},
    ),
    "cispo": PolicyLoss(cispo_policy_loss, "token-mean", {"clip_low": 1.0, "clip_high": 0.28}),
    "sapo": PolicyLoss(
        sapo_policy_loss,
        "seq-mean-token-mean",
        {"temperature_positive": 1.0, "temperature_negative": 1.05},
    ),
    "reinforce": PolicyLoss(reinforce_policy_loss, "token-mean"),
}


def get_policy_loss(name: str) -> PolicyLoss:
    """The entry of `POLICY_LOSSES`; an unknown name is a ValueError that lists the known ones."""
    return lookup(POLICY_LOSSES, name, kind="policy loss")


def build_policy_loss(name: str, options: Mapping[str, float | None]) -> PolicyLossFunction:
    """The named loss with its hyper-parameters bound.

    Args:
        name: A name in `POLICY_LOSSES`.
        options: Hyper-parameters by name; None means the loss's own default.

    Raises:
        ValueError: unknown name, or a value (not None) for an option the loss does not have.
    """
    entry = get_policy_loss(name)
    given = {option: value for option, value in options.items() if value is not None}
    reject_unknown_options(given, entry.options, owner=f"policy loss {name!r}")
    return partial(entry.function, **{**entry.options, **given})

"""Estimates of KL(policy || reference) from sampled tokens, and the controllers of its weight.

d = logprobs - ref_logprobs. What each estimator optimises, per token and exactly:

    k1 in the reward            gradient of KL(policy || reference)
    k2 as a loss                gradient of KL(policy || reference), though its value is biased
    k3 as a loss                unbiased value, gradient of KL(reference || policy)
    k3_is as a loss             unbiased value and gradient of KL(policy || reference), off-policy
    k1 as a loss                no expected gradient: noise only
    k2, k3 in the reward        biased

Source: Schulman, "Approximating KL divergence"; k3 as a loss: GRPO, arXiv:2402.03300; k3_is:
DeepSeek-V3.2, arXiv:2512.02556.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightrft.algorithms.lookup import lookup
from lightrft.algorithms.masking import mask_out
from lightrft.algorithms.ratios import log_ratio, masked_difference

if TYPE_CHECKING:
    from torch import Tensor

KlEstimator = Callable[["Tensor", "Tensor", "Tensor", "Tensor | None"], "Tensor"]
"""(logprobs, ref_logprobs, response_mask, old_logprobs or None) -> [batch, seq]."""


def _k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, _: Tensor | None) -> Tensor:
    return masked_difference(logprobs, ref_logprobs, mask)


def _k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, _: Tensor | None) -> Tensor:
    return masked_difference(logprobs, ref_logprobs, mask).square() / 2


def _k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, _: Tensor | None) -> Tensor:
    d = log_ratio(logprobs, ref_logprobs, mask).values
    # expm1, not exp - 1: near d = 0 the value is d^2/2, far below the rounding of exp(-d).
    return (-d).expm1() + d


def _k3_is(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, old: Tensor | None) -> Tensor:
    if old is None:
        raise ValueError("KL estimator 'k3_is' needs old_logprobs, the policy that was sampled")
    ratio = log_ratio(logprobs, old, mask).values.exp()
    return ratio * _k3(logprobs, ref_logprobs, mask, None)


KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": _k1, "k2": _k2, "k3": _k3, "k3_is": _k3_is}


def estimate_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    estimator: str,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Per-token estimate of KL(policy || reference): [batch, seq], 0 outside the mask.

    k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d,  k3_is = exp(logprobs - old_logprobs) k3

    d is clamped to +-20 where it is exponentiated; the gradient is 0 beyond.

    Args:
        logprobs: [batch, seq]; gradients flow through it only.
        ref_logprobs: [batch, seq].
        response_mask: [batch, seq] bool.
        estimator: A name in `KL_ESTIMATORS`.
        old_logprobs: [batch, seq] under the policy that was sampled; needed by k3_is.

    Raises:
        ValueError: unknown estimator, or k3_is without `old_logprobs`.
    """
    function = lookup(KL_ESTIMATORS, estimator, kind="KL estimator")
    return mask_out(function(logprobs, ref_logprobs, response_mask, old_logprobs), response_mask)


@dataclass(frozen=True, slots=True)
class FixedKlController:
    """A constant weight of the KL term.

    Args:
        coef: The weight.
    """

    coef: float

    def update(self, kl: float, *, num_samples: int) -> FixedKlController:
        """Itself, whatever was measured."""
        del kl, num_samples
        return self


@dataclass(frozen=True, slots=True)
class AdaptiveKlController:
    """A weight that follows a target KL.

    coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon)

    Source: Ziegler et al. 2019, arXiv:1909.08593.

    Args:
        coef: The present weight.
        target: The KL to hold, in the unit of the measured one (per token or per sequence).
        horizon: In samples: over this many, the weight changes by about 20 % at most.

    Raises:
        ValueError: target or horizon is not positive.
    """

    coef: float
    target: float
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        if not self.target > 0 or not self.horizon > 0:
            raise ValueError(
                "target and horizon of the adaptive KL controller must be positive: got "
                f"{self.target} and {self.horizon}"
            )

    def update(self, kl: float, *, num_samples: int) -> AdaptiveKlController:
        """The controller after one step.

        Args:
            kl: Mean KL of the step over all ranks.
            num_samples: Samples of the step over all ranks.

        Raises:
            ValueError: `kl` is not finite.
        """
        if not math.isfinite(kl):
            raise ValueError(f"measured KL must be finite: got {kl}")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * num_samples / self.horizon))


KlController = FixedKlController | AdaptiveKlController

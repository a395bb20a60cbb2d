"""Estimates of KL(policy || reference) from sampled tokens, and the controllers of its weight;
divergences over the whole vocabulary.

A loss keeps each token's distribution near the reference, at the sampled states; effects on later
tokens count only in the reward. d = logprobs - ref_logprobs. What each estimator optimises, per
token and exactly:

    k1 in the reward            gradient of KL(policy || reference)
    k2 as a loss                gradient of KL(policy || reference), though its value is biased
    k3+ as a loss               value of k3, gradient of k2; k1+ likewise
    k3 as a loss                unbiased value, gradient of KL(reference || policy); both up to
                                the bound of its value
    k1_is, k2_is, k3_is         times the ratio to the policy that was sampled; as a loss the
                                gradient of KL(policy || reference), off-policy, at any distance
    k1 as a loss                no expected gradient: noise only
    abs as a loss               gradient of 2 total variations: pulls every token equally hard
    others in the reward        the value's gradient less that as a loss: it vanishes near the
                                reference, and its sign is wrong for a policy that is more peaked

Source: Schulman, "Approximating KL divergence"; k3 as a loss: GRPO, arXiv:2402.03300; k3_is:
DeepSeek-V3.2, arXiv:2512.02556; k1+ and k3+: verl.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightrft.algorithms.interface import lookup
from lightrft.algorithms.masking import MAX_LOG_RATIO, log_ratio, mask_out, masked_difference

MAX_K3 = 10.0


def k3_kl(d: Tensor) -> Tensor:
    """k3 = exp(-d) - 1 + d, d held within +-20, at most 10; without gradient beyond.

    d = -11 would weigh 6e4 and d = -20 4.9e8: one token would dominate the step. The same bound is
    in verl, OpenRLHF, slime, AReaL, NeMo-RL, SkyRL and ROLL; TRL has none (`k3_unclamped`).
    """
    return k3_unclamped_kl(d).clamp(max=MAX_K3)


def k3_unclamped_kl(d: Tensor) -> Tensor:
    """k3 with d within +-20 as its only bound."""
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1, not exp - 1: near d = 0 the value is d^2/2, far below the rounding of exp(-d).
    return (-d).expm1() + d


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


@dataclass(frozen=True, slots=True)
class KlEstimator:
    """An estimate of the KL divergence of a token, as a function of d.

    Args:
        value: Function of d.
        slope: Derivative as a function of d, where it is not that of the value; or None.
        has_ratio: Whether both are multiplied by the ratio to the policy that was sampled.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor] | None = None
    has_ratio: bool = False


KL_ESTIMATORS: dict[str, KlEstimator] = {
    "k1": KlEstimator(_k1),
    "abs": KlEstimator(Tensor.abs),
    "k2": KlEstimator(_k2),
    "k3": KlEstimator(k3_kl),
    "k3_unclamped": KlEstimator(k3_unclamped_kl),
    "k1+": KlEstimator(_k1, _k1),
    "k3+": KlEstimator(k3_kl, _k1),
    "k1_is": KlEstimator(_k1, lambda d: d + 1, has_ratio=True),
    "k2_is": KlEstimator(_k2, _k1, has_ratio=True),
    "k3_is": KlEstimator(k3_kl, _k1, has_ratio=True),
}


def estimate_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    estimator: str,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Per-token estimate of KL(policy || reference): [batch, seq], 0 outside the mask.

    k1 = d,  abs = |d|,  k2 = d^2 / 2,  k3 = min(exp(-d) - 1 + d, 10),  k3_unclamped without the
    bound;  k1+ and k3+ with the gradient d;  k1_is = rho k1 with the gradient rho (d + 1),
    k2_is = rho k2 and k3_is = rho k3 with the gradient rho d,  rho = exp(logprobs - old_logprobs)

    d and the logarithm of rho are clamped to +-20 where they are exponentiated; the gradient of k3
    is 0 beyond, those that are written above stay.

    Args:
        logprobs: [batch, seq]; gradients flow through it only.
        ref_logprobs: [batch, seq].
        response_mask: [batch, seq] bool.
        estimator: A name in `KL_ESTIMATORS`.
        old_logprobs: [batch, seq] under the policy that was sampled; needed by k1_is to k3_is.

    Raises:
        ValueError: unknown estimator, or one with a ratio without `old_logprobs`.
    """
    kl_estimator = lookup(KL_ESTIMATORS, estimator, kind="KL estimator")
    d = masked_difference(logprobs, ref_logprobs, response_mask)
    kl = kl_estimator.value(d)
    if kl_estimator.slope is not None:
        # The derivative of rho k3, written by hand: where the value is held, autograd would give
        # the derivative of the ratio alone, 5e8 in the wrong direction at d = -20.
        slope = kl_estimator.slope(d.detach())
        if kl_estimator.has_ratio:
            if old_logprobs is None:
                raise ValueError(
                    f"KL estimator {estimator!r} needs old_logprobs, the policy that was sampled"
                )
            ratio = log_ratio(logprobs, old_logprobs, response_mask).values.exp().detach()
            kl, slope = ratio * kl, ratio * slope
        kl = kl.detach() + slope * (d - d.detach())
    return mask_out(kl, response_mask)


@dataclass(frozen=True, slots=True)
class KlController:
    """The weight of the KL term: constant, or following a target KL.

    coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon)

    Source: Ziegler et al. 2019, arXiv:1909.08593.

    Args:
        coef: The present weight.
        target: The KL to hold, in the unit of the measured one (per token or per sequence); None
            keeps the weight.
        horizon: In samples: over this many, the weight changes by about 20 % at most.

    Raises:
        ValueError: target or horizon is not positive.
    """

    coef: float
    target: float | None = None
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        if self.target is not None and not (self.target > 0 and self.horizon > 0):
            raise ValueError(
                "target and horizon of the adaptive KL controller must be positive: got "
                f"{self.target} and {self.horizon}"
            )

    def update(self, kl: float, *, num_samples: int) -> KlController:
        """Return the controller after one step.

        Args:
            kl: Mean KL of the step over all ranks.
            num_samples: Samples of the step over all ranks.

        Raises:
            ValueError: `kl` is not finite.
        """
        if self.target is None:
            return self
        if not math.isfinite(kl):
            raise ValueError(f"measured KL must be finite: got {kl}")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * num_samples / self.horizon))


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(dim=-1)


def _jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


# A probability that rounding took below 0.
LEAST_TAIL = 1e-7


def top_and_tail(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities of some tokens and, last, of all others together: [tokens, k + 1].

    The coarser distribution loses what lies within the tail, so that a divergence of two of them is
    at most that of the whole ones, at least 0, and 0 where both are equal. Without the tail it is
    no divergence: it falls below 0 where the student moves mass out of the k tokens.

    Args:
        logits: [tokens, vocab]; gradients flow through them.
        token_ids: [tokens, k] int64, different ones in each row.

    Raises:
        ValueError: The tokens are all there are, so that nothing is left for the tail.
    """
    if token_ids.shape[1] >= logits.shape[1]:
        raise ValueError(
            f"{token_ids.shape[1]} tokens of a vocabulary of {logits.shape[1]} leave no tail"
        )
    whole = logits.logsumexp(dim=-1, keepdim=True)
    rest = logits.scatter(-1, token_ids, -math.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logits.gather(-1, token_ids), rest], dim=-1) - whole


def with_tail(logprobs: Tensor) -> Tensor:
    """Log-probabilities [tokens, k] and, last, that of all other tokens: [tokens, k + 1]."""
    mass = logprobs.exp().sum(dim=-1, keepdim=True)
    return torch.cat([logprobs, (1 - mass).clamp(min=LEAST_TAIL).log()], dim=-1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "reverse": lambda student, teacher, _: _kl(student, teacher),
    "forward": lambda student, teacher, _: _kl(teacher, student),
    "jsd": _jsd,
}


def divergence(student: Tensor, teacher: Tensor, *, form: str, beta: float = 0.5) -> Tensor:
    """Return one divergence per token, of q the student and p the teacher: [tokens].

    reverse  sum_v q (log q - log p);  forward  sum_v p (log p - log q);
    jsd  beta KL(p || m) + (1 - beta) KL(q || m),  m = beta p + (1 - beta) q

    Source: Agarwal et al. 2024, arXiv:2306.13649, where jsd is generalised; its ends, 0 in
    themselves, are the other two.

    Args:
        student, teacher: [tokens, vocab] logits; gradients flow through both.
        form: A name in `DIVERGENCES`.
        beta: Weight of the teacher in the mixture of jsd, in (0, 1).

    Raises:
        ValueError: unknown form.
    """
    divergence_of = lookup(DIVERGENCES, form, kind="divergence")
    return divergence_of(student.log_softmax(dim=-1), teacher.log_softmax(dim=-1), beta)

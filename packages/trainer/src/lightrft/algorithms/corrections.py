"""Weights that correct for the difference between the engine's, the old and the new policy.

The weights are detached, multiply the numerator of the aggregation only, and leave the response
mask alone: a rejected token has weight 0 and is still counted. What is computed is composed of the
terms of `correction_terms`: at most one weight, and any number of tests that reject.

Source: decoupled PPO, arXiv:2110.00641; IcePop, arXiv:2510.18855.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightrft.algorithms.correction_terms import CorrectionTerm
from lightrft.algorithms.masking import (
    MAX_LOG_RATIO,
    mask_like,
    mask_out,
    masked_difference,
    masked_row_mean,
    masked_row_sum,
)


@dataclass(frozen=True, slots=True)
class CorrectionWeights:
    """Factors of the token loss.

    Args:
        weights: [batch, seq], 0 outside the response mask and where rejected.
        raw: [batch, seq] token ratios of the first term's pair before bounds and rejection; 0
            where not finite.
        is_capped: [batch, seq] bool, the weight was held at a bound.
        is_rejected: [batch, seq] bool, the weight was set to 0.
        is_invalid: [batch, seq] bool, a log-probability is NaN or infinite: the engine or the
            trainer is broken.
        sums: [2] float64 for `normalized`: the sum of the weights before rejection, and their
            number; rows where the weight is one of rows, else tokens.
    """

    weights: Tensor
    raw: Tensor
    is_capped: Tensor
    is_rejected: Tensor
    is_invalid: Tensor
    sums: Tensor

    def normalized(self, sums: Tensor) -> CorrectionWeights:
        """Return the weights divided by the mean weight of the batch.

        Args:
            sums: Sums of all ranks and micro-batches, added.
        """
        total, count = sums.double()
        scale = torch.where(total > 0, count / total, 1.0)
        return replace(self, weights=self.weights * scale.to(self.weights.dtype))


@torch.no_grad()
def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    terms: Sequence[CorrectionTerm],
    advantages: Tensor | None = None,
    new_logprobs: Tensor | None = None,
) -> CorrectionWeights:
    """Off-policy correction weights of every response token.

    A token whose log-probabilities are not finite is rejected, and with it whatever depends on
    it: the whole row where a statistic of rows is asked for. Exponents are held within +-20.

    Args:
        old_logprobs: [batch, seq] of the trainer, before the update.
        rollout_logprobs: [batch, seq] of the engine; all follow one temperature and truncation.
        response_mask: [batch, seq] bool.
        terms: From `correction_terms.parse_correction`.
        advantages: [batch, seq]; needed by terms for one sign of them only.
        new_logprobs: [batch, seq] of the policy that is being trained; needed by terms on it.

    Raises:
        ValueError: `advantages` or `new_logprobs` is missing, or shapes differ.
    """
    policies = {"old": old_logprobs, "engine": rollout_logprobs}
    if new_logprobs is not None:
        policies["new"] = new_logprobs
    elif any(term.follows_policy for term in terms):
        raise ValueError("a correction by the new policy needs its log-probabilities")
    compared = {
        (first, second): masked_difference(policies[first], policies[second], response_mask)
        for first, second in [term.sides for term in terms] or [("old", "engine")]
    }
    is_invalid = ~torch.stack([*compared.values()]).isfinite().all(dim=0)
    compared = {key: each.masked_fill(is_invalid, torch.nan) for key, each in compared.items()}
    raw = _exp(next(iter(compared.values())))
    weights, is_capped = torch.ones_like(raw), torch.zeros_like(response_mask)
    sums = torch.stack([response_mask.sum().double()] * 2)
    is_rejected = is_invalid
    for term in terms:
        log_ratios = compared[term.sides]
        if term.action == "weight":
            free = _exp(_at_level(log_ratios, response_mask, term.level))
            weights = free.clamp(term.low, term.high) if term.is_bounded else free
            is_capped = response_mask & (weights != free) & ~free.isnan()
            is_rejected = is_rejected | (response_mask & free.isnan())
            sums = _weight_sums(weights, response_mask & ~free.isnan(), term.level)
        else:
            statistic = _statistic(term, log_ratios, policies, response_mask)
            is_tested = _is_tested(term, log_ratios, advantages, response_mask)
            is_rejected = is_rejected | _is_rejected(term, statistic, is_tested, response_mask)
    return CorrectionWeights(
        weights=mask_out(weights, response_mask & ~is_rejected),
        raw=mask_out(raw, response_mask & ~is_invalid),
        is_capped=is_capped & ~is_rejected,
        is_rejected=is_rejected,
        is_invalid=is_invalid,
        sums=sums,
    )


def _statistic(
    term: CorrectionTerm,
    log_ratios: Tensor,
    policies: Mapping[str, Tensor],
    mask: Tensor,
) -> Tensor:
    """Return the statistic that a term compares with its bounds: [batch, seq]."""
    if term.statistic == "ratio":
        return _exp(_at_level(log_ratios, mask, term.level))
    if term.statistic in ("difference", "variation", "binary_kl"):
        first, second = (mask_out(policies[side].double(), mask) for side in term.sides)
        values = first.exp() - second.exp()
        if term.statistic == "binary_kl":
            # 1 - p by expm1: of a token that is nearly certain it has no digit left otherwise.
            others = [(-each.expm1()).clamp(min=0) for each in (first, second)]
            values = second.exp() * (second - first)
            values += torch.xlogy(others[1], others[1]) - torch.xlogy(others[1], others[0])
        values = torch.where(log_ratios.isnan(), torch.nan, values)
        values = values.abs() if term.statistic == "variation" else values
    elif term.statistic == "distance":
        values = (_exp(log_ratios) - 1).abs()
    elif term.statistic in ("k3", "reverse_k3"):
        held = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        held = held if term.statistic == "k3" else -held
        values = held.expm1() - held
    else:
        values = -log_ratios if term.statistic == "k1" else log_ratios.square() / 2
    return _at_level(values, mask, term.level)


def _at_level(values: Tensor, mask: Tensor, level: str) -> Tensor:
    if level in ("token", "worst"):
        return values
    if level == "largest":
        return torch.where(mask, values, -torch.inf).amax(-1, keepdim=True).expand_as(values)
    reduce = masked_row_sum if level == "sequence" else masked_row_mean
    return reduce(values, mask).unsqueeze(-1).expand_as(values)


def _exp(logarithms: Tensor) -> Tensor:
    return logarithms.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _is_rejected(
    term: CorrectionTerm, statistic: Tensor, is_tested: Tensor, mask: Tensor
) -> Tensor:
    """Return the tokens that a test leaves out; those with NaN are left out."""
    low = -math.inf if term.low is None else term.low
    high = math.inf if term.high is None else term.high
    is_rejected = is_tested & ~((statistic >= low) & (statistic <= high))
    if term.action == "veto" or term.level == "worst":
        is_rejected = mask & is_rejected.any(dim=-1, keepdim=True)
    return is_rejected


def _is_tested(
    term: CorrectionTerm, log_ratios: Tensor, advantages: Tensor | None, mask: Tensor
) -> Tensor:
    """Tokens whose advantage, or change beside it, is of the sign that a test asks for."""
    if term.sign is None:
        return mask
    if advantages is None:
        raise ValueError(f"a correction for {term.sign} advantages only needs the advantages")
    inside = mask_like(advantages, advantages, mask)
    if term.sign == "towards":
        return mask & (inside * log_ratios > 0)
    if term.level in ("sequence", "geometric", "largest"):
        inside = _at_level(inside, mask, "geometric")
    return mask & (inside < 0 if term.sign == "negative" else inside > 0)


def _weight_sums(weights: Tensor, is_counted: Tensor, level: str) -> Tensor:
    inside = mask_out(weights.double(), is_counted)
    if level == "token":
        return torch.stack([inside.sum(), is_counted.sum().double()])
    rows = is_counted.any(dim=-1)
    return torch.stack([inside.amax(dim=-1).sum(), rows.sum().double()])

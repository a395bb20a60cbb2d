"""Losses of scalar reward models: one value for each pair of answers, or for each labelled one.

A pair loss takes `differences` [pairs], score of the better answer - score of the other - margin,
and `is_tie` [pairs] bool, pairs of which neither is better. It does not see the scores themselves:
no preference between two answers depends on what both have in common. A label loss takes `scores`
and `labels`, both [rows]. Hyper-parameters are keyword-only.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry(differences: Tensor, is_tie: Tensor, *, tie_coef: float = 0.01) -> Tensor:
    """Negative log-probability of the preference: log(1 + exp(-d)); of a tie, tie_coef |d|.

    Source: Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the margin is that
    of Touvron et al. 2023, arXiv:2307.09288, eq. 2.
    """
    return torch.where(is_tie, tie_coef * differences.abs(), F.softplus(-differences))


def scaled_bradley_terry(
    differences: Tensor, is_tie: Tensor, *, scale: float = 1 / 0.07, tie_coef: float = 0.01
) -> Tensor:
    """Cross-entropy of the pair's two scores times `scale`: log(1 + exp(-scale d)).

    A tie costs tie_coef |d|, which is not scaled.

    Source: Wu et al. 2023 (HPS v2), arXiv:2306.09341, sec. 4; the scale is CLIP's at the
    start, and constant.
    """
    return torch.where(is_tie, tie_coef * differences.abs(), F.softplus(-scale * differences))


def rao_kupper(differences: Tensor, is_tie: Tensor, *, tie_width: float = 0.5) -> Tensor:
    """Negative log-probability of a preference, or of a tie, where close scores are mostly ties.

    p(better) = s(d - w), p(tie) = (exp(2 w) - 1) s(d - w) s(-d - w); the three add up to 1.

    Source: Rao and Kupper 1967, Ties in paired-comparison experiments, with w = log(theta).

    Raises:
        ValueError: The width is not positive.
    """
    if tie_width <= 0:
        raise ValueError(f"tie_width must be positive: got {tie_width}")
    better = F.softplus(tie_width - differences)
    other = F.softplus(tie_width + differences)
    return torch.where(is_tie, better + other - math.log(math.expm1(2 * tie_width)), better)


def squared_error(scores: Tensor, labels: Tensor) -> Tensor:
    """(score - label)^2."""
    return (scores - labels).square()


def binary_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """-label log s(score) - (1 - label) log s(-score), of labels from 0 to 1."""
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")

"""Preference losses by their definitions, from summed log-probabilities of answers.

c and r are summed log-probabilities of the chosen and the rejected answer, cr and rr the same under
the reference, n_c and n_r numbers of tokens; u = c - cr, v = r - rr.

Sources: papers in the docstrings, with the conventions of docs/prefer.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid as log_sigmoid

from lightrft.tools.audit.pairs import Pair


@dataclass(frozen=True, slots=True)
class Answers:
    """Summed log-probabilities of chosen or of rejected answers.

    Args:
        sums, reference: Sums of the policy and the reference; those of the run order values that
            are equal up to rounding: [answers].
        tokens: Number of tokens: [answers].
    """

    sums: Pair
    reference: Pair
    tokens: Tensor

    @property
    def ratios(self) -> Pair:
        """Log-ratios of policy and reference."""
        return self.sums.minus(self.reference)

    @property
    def means(self) -> Tensor:
        """Mean log-probabilities of a token."""
        return self.sums.exact / self.tokens


@dataclass(frozen=True, slots=True)
class Pairs:
    """Chosen and rejected answers in the same order, and numbers of the step.

    Args:
        chosen, rejected: See `Answers`.
        z: Mean log-ratio of answers behind other prompts.
        doubt: Rounding of a sum.
    """

    chosen: Answers
    rejected: Answers
    z: float
    doubt: float

    @property
    def u(self) -> Tensor:
        """Log-ratios of chosen answers."""
        return self.chosen.ratios.exact

    @property
    def v(self) -> Tensor:
        """Log-ratios of rejected answers."""
        return self.rejected.ratios.exact

    @property
    def gap(self) -> Tensor:
        """Difference u - v."""
        return self.u - self.v

    @property
    def mean_ratios(self) -> Tensor:
        """Difference u / n_c - v / n_r."""
        return self.u / self.chosen.tokens - self.v / self.rejected.tokens

    def in_order(self, values: Pair) -> Tensor:
        """Sort values; those equal up to rounding stay in the run's order."""
        ordered = values.exact[torch.argsort(values.run, stable=True)]
        if bool((ordered.diff() < -4 * self.doubt).any()):
            ordered = values.exact[torch.argsort(values.exact, stable=True)]
        return ordered


def dpo(p: Pairs, beta: float = 0.1) -> Tensor:
    """Follow Rafailov et al. 2023, arXiv:2305.18290, eq. 7."""
    return -log_sigmoid(beta * p.gap)


def cdpo(p: Pairs, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """Follow Mitchell 2023: labels are wrong with probability e."""
    return _noisy(beta * p.gap, label_smoothing)


def robust(p: Pairs, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """Follow Chowdhury et al. 2024, arXiv:2403.00409, eq. 9."""
    x, e = beta * p.gap, label_smoothing
    return (-(1 - e) * log_sigmoid(x) + e * log_sigmoid(-x)) / (1 - 2 * e)


def hinge(p: Pairs, beta: float = 0.1) -> Tensor:
    """Follow Zhao et al. 2023, arXiv:2305.10425, on log-ratios."""
    return torch.relu(1 - beta * p.gap)


def ipo(p: Pairs, beta: float = 0.1) -> Tensor:
    """Follow Azar et al. 2023, arXiv:2310.12036, eq. 17, means over tokens."""
    return (p.mean_ratios - 0.5 / beta) ** 2


def dpo_norm(p: Pairs, beta: float = 0.1) -> Tensor:
    """Follow Lambert et al. 2024, arXiv:2411.15124, eq. 6."""
    return -log_sigmoid(beta * p.mean_ratios)


def exo(p: Pairs, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    """Follow Ji et al. 2024, arXiv:2402.00856, eq. 17: KL of (s(x), s(-x)) from (1 - e, e)."""
    x, e = beta * p.gap, label_smoothing
    right = torch.sigmoid(x) * (log_sigmoid(x) - math.log(1 - e))
    return right + torch.sigmoid(-x) * (log_sigmoid(-x) - math.log(e))


def nca(p: Pairs, beta: float = 0.1) -> Tensor:
    """Follow Chen et al. 2024, arXiv:2402.05369."""
    u, v = beta * p.u, beta * p.v
    return -log_sigmoid(u) - (log_sigmoid(-u) + log_sigmoid(-v)) / 2


def sppo(p: Pairs, beta: float = 0.1) -> Tensor:
    """Follow Wu et al. 2024, arXiv:2405.00675, chances of winning 1 and 0."""
    return (p.u - 0.5 / beta) ** 2 + (p.v + 0.5 / beta) ** 2


def apo_zero(p: Pairs, beta: float = 0.1) -> Tensor:
    """Follow D'Oosterlinck et al. 2024, arXiv:2408.06266."""
    return 1 - torch.sigmoid(beta * p.u) + torch.sigmoid(beta * p.v)


def apo_zero_unpaired(p: Pairs, beta: float = 0.1) -> Tensor:
    """Compute the terms of `apo_zero` for each answer."""
    return torch.cat([1 - torch.sigmoid(beta * p.u), torch.sigmoid(beta * p.v)])


def apo_down(p: Pairs, beta: float = 0.1) -> Tensor:
    """Follow D'Oosterlinck et al. 2024, arXiv:2408.06266."""
    return torch.sigmoid(beta * p.u) + 1 - torch.sigmoid(beta * p.gap)


def bco(p: Pairs, beta: float = 0.1, delta: float = 0.0) -> Tensor:
    """Follow Jung et al. 2024, arXiv:2404.04656, delta constant."""
    return -log_sigmoid(beta * p.u - delta) - log_sigmoid(delta - beta * p.v)


def discopop(p: Pairs, beta: float = 0.1, tau: float = 0.05) -> Tensor:
    """Follow Lu et al. 2024, arXiv:2406.08414, the log-ratio modulated loss."""
    x = beta * p.gap
    log_share = log_sigmoid(x / tau)
    return torch.exp(log_share - x) - (1 - torch.exp(log_share)) * log_sigmoid(x)


def aot(p: Pairs, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Follow Melnyk et al. 2024, arXiv:2406.05882, paired: quantiles of margins."""
    policy = p.in_order(p.chosen.sums.minus(p.rejected.sums))
    reference = p.in_order(p.chosen.reference.minus(p.rejected.reference))
    return _noisy(beta * (policy - reference), label_smoothing)


def aot_unpaired(p: Pairs, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Compute `aot` without pairs: quantiles of log-ratios."""
    gaps = p.in_order(p.chosen.ratios) - p.in_order(p.rejected.ratios)
    return _noisy(beta * gaps, label_smoothing)


def kto(
    p: Pairs, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """Follow Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7 and 8."""
    good = desirable_weight * (1 - torch.sigmoid(beta * (p.u - p.z)))
    other = undesirable_weight * (1 - torch.sigmoid(beta * (p.z - p.v)))
    return torch.cat([good, other])


def simpo(p: Pairs, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """Follow Meng et al. 2024, arXiv:2405.14734, eq. 6."""
    return -log_sigmoid(beta * (p.chosen.means - p.rejected.means) - gamma)


def cpo(p: Pairs, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    """Follow Xu et al. 2024, arXiv:2401.08417, eq. 3, the second term per chosen token."""
    return alpha * sft(p) - log_sigmoid(beta * p.chosen.sums.minus(p.rejected.sums).exact)


def orpo(p: Pairs, beta: float = 0.1) -> Tensor:
    """Follow Hong et al. 2024, arXiv:2403.07691, eqs. 5 to 7."""
    chosen, rejected = (
        each - (-torch.expm1(each)).log() for each in (p.chosen.means, p.rejected.means)
    )
    return sft(p) - beta * log_sigmoid(chosen - rejected)


def sft(p: Pairs) -> Tensor:
    """Return each pair's share of the mean over tokens of chosen answers."""
    return -p.chosen.sums.exact / p.chosen.tokens.mean()


def _noisy(x: Tensor, share: float) -> Tensor:
    return -(1 - share) * log_sigmoid(x) - share * log_sigmoid(-x)


# One value per pair, or per answer; hyper-parameters are further arguments.
PairFormula = Callable[..., Tensor]
WITHOUT_REFERENCE: tuple[PairFormula, ...] = (simpo, cpo, orpo, sft)
_LOSSES: tuple[PairFormula, ...] = (
    *(dpo, cdpo, robust, hinge, ipo, dpo_norm, exo, nca, sppo, apo_zero, apo_zero_unpaired),
    *(apo_down, bco, discopop, aot, aot_unpaired, kto, *WITHOUT_REFERENCE),
)
PREFERENCE_LOSSES: dict[str, PairFormula] = {each.__name__: each for each in _LOSSES}
# Names in TRL.
OTHER_NAMES: dict[str, PairFormula] = {
    "sigmoid": dpo,
    "sigmoid_norm": dpo_norm,
    "exo_pair": exo,
    "nca_pair": nca,
    "sppo_hard": sppo,
    "bco_pair": bco,
}

"""Preference losses: functions of what both answers of each pair sum up to.

Notation: c, r are sums of logprobs over the tokens of the chosen and the rejected answer, cr, rr
the same under the reference, n_c, n_r numbers of tokens; u = c - cr, v = r - rr, d = u - v,
S = logsigmoid, s = sigmoid. A loss gives one number per pair, or one per answer, whose mean over
the whole step is minimised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.algorithms.interface import preference_loss


@dataclass(frozen=True, slots=True)
class AnswerSums:
    """Sums over the tokens of answers.

    Args:
        logprobs: [answers] float64, of the policy.
        ref_logprobs: [answers] float64 without graph, of the reference; 0 without one.
        num_tokens: [answers] float64.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    num_tokens: Tensor

    @property
    def log_ratios(self) -> Tensor:
        """[answers], policy over reference."""
        return self.logprobs - self.ref_logprobs

    @property
    def mean_logprobs(self) -> Tensor:
        """[answers], per token."""
        return self.logprobs / self.num_tokens

    @property
    def mean_log_ratios(self) -> Tensor:
        """[answers], per token."""
        return self.log_ratios / self.num_tokens


@dataclass(frozen=True, slots=True)
class PreferenceSums:
    """Sums of some pairs, and what the whole step agreed on.

    Args:
        chosen, rejected: Answer i of both is to prompt i; of labelled answers, those that are good
            and those that are not, as many as there are.
        tokens_per_chosen: Mean tokens of a chosen answer over all pairs of the step.
        kl: Mean log-ratio of answers to other prompts over the step, at least 0; without graph.
    """

    chosen: AnswerSums
    rejected: AnswerSums
    tokens_per_chosen: float = 1.0
    kl: float = 0.0

    @property
    def gaps(self) -> Tensor:
        """[pairs] d."""
        return self.chosen.log_ratios - self.rejected.log_ratios


@preference_loss()
def dpo_loss(sums: PreferenceSums, *, beta: float = 0.1) -> Tensor:
    """-S(beta d).

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7.
    """
    return -F.logsigmoid(beta * sums.gaps)


@preference_loss()
def cdpo_loss(sums: PreferenceSums, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """-(1 - e) S(beta d) - e S(-beta d): a label is wrong with probability e.

    Source: Mitchell 2023, "A note on DPO with noisy preferences".

    Raises:
        ValueError: e is not in [0, 0.5).
    """
    return _smoothed(beta * sums.gaps, label_smoothing)


@preference_loss()
def robust_loss(sums: PreferenceSums, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """(-(1 - e) S(beta d) + e S(-beta d)) / (1 - 2e), unbiased if labels are wrong so often.

    Source: Chowdhury et al. 2024, arXiv:2403.00409.

    Raises:
        ValueError: e is not in [0, 0.5).
    """
    share, logits = _share(label_smoothing), beta * sums.gaps
    wrong = share * F.logsigmoid(-logits)
    return (wrong - (1 - share) * F.logsigmoid(logits)) / (1 - 2 * share)


@preference_loss()
def hinge_loss(sums: PreferenceSums, *, beta: float = 0.1) -> Tensor:
    """max(0, 1 - beta d).

    Source: Zhao et al. 2023, arXiv:2305.10425, on log-ratios.
    """
    return F.relu(1 - beta * sums.gaps)


@preference_loss(is_per_token=True)
def ipo_loss(sums: PreferenceSums, *, beta: float = 0.1) -> Tensor:
    """(u / n_c - v / n_r - 1 / (2 beta))^2.

    Source: Azar et al. 2023, arXiv:2310.12036, on means over tokens.
    """
    _require_positive("beta", beta)
    gaps = sums.chosen.mean_log_ratios - sums.rejected.mean_log_ratios
    return (gaps - 1 / (2 * beta)).square()


@preference_loss(is_per_token=True)
def dpo_norm_loss(sums: PreferenceSums, *, beta: float = 0.1) -> Tensor:
    """-S(beta (u / n_c - v / n_r)).

    Source: Lambert et al. 2024, arXiv:2411.15124; beta is 5 there.
    """
    return -F.logsigmoid(beta * (sums.chosen.mean_log_ratios - sums.rejected.mean_log_ratios))


@preference_loss()
def exo_loss(sums: PreferenceSums, *, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    """s(beta d) (S(beta d) - log(1 - e)) + s(-beta d) (S(-beta d) - log e).

    Source: Ji et al. 2024, arXiv:2402.00856.

    Raises:
        ValueError: e is not in (0, 0.5).
    """
    _require_positive("label_smoothing", label_smoothing)
    share, logits = _share(label_smoothing), beta * sums.gaps
    right = logits.sigmoid() * (F.logsigmoid(logits) - math.log1p(-share))
    return right + (-logits).sigmoid() * (F.logsigmoid(-logits) - math.log(share))


@preference_loss()
def nca_loss(sums: PreferenceSums, *, beta: float = 0.1) -> Tensor:
    """-S(beta u) - 0.5 S(-beta u) - 0.5 S(-beta v).

    Source: Chen et al. 2024, arXiv:2402.05369.
    """
    chosen, rejected = _rewards(sums, beta)
    against = F.logsigmoid(-chosen) + F.logsigmoid(-rejected)
    return -F.logsigmoid(chosen) - 0.5 * against


@preference_loss()
def sppo_loss(sums: PreferenceSums, *, beta: float = 0.1) -> Tensor:
    """(u - 1 / (2 beta))^2 + (v + 1 / (2 beta))^2.

    Source: Wu et al. 2024, arXiv:2405.00675, with hard labels.
    """
    _require_positive("beta", beta)
    target = 1 / (2 * beta)
    return (sums.chosen.log_ratios - target).square() + (sums.rejected.log_ratios + target).square()


@preference_loss()
def apo_zero_loss(sums: PreferenceSums, *, beta: float = 0.1) -> Tensor:
    """1 - s(beta u) + s(beta v): for chosen answers better than the model's.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266.
    """
    chosen, rejected = _rewards(sums, beta)
    return 1 - chosen.sigmoid() + rejected.sigmoid()


@preference_loss(is_of_answers=True)
def apo_zero_unpaired_loss(
    sums: PreferenceSums,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """w_d (1 - s(beta u)) of a good answer, w_u s(beta v) of another; see `apo_zero_loss`."""
    chosen, rejected = _rewards(sums, beta)
    good, other = 1 - chosen.sigmoid(), rejected.sigmoid()
    return torch.cat([desirable_weight * good, undesirable_weight * other])


@preference_loss()
def apo_down_loss(sums: PreferenceSums, *, beta: float = 0.1) -> Tensor:
    """s(beta u) + 1 - s(beta d): for chosen answers worse than the model's.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266.
    """
    chosen, rejected = _rewards(sums, beta)
    return chosen.sigmoid() + 1 - (chosen - rejected).sigmoid()


@preference_loss()
def bco_loss(sums: PreferenceSums, *, beta: float = 0.1, delta: float = 0.0) -> Tensor:
    """-S(beta u - delta) - S(-(beta v - delta)).

    Source: Jung et al. 2024, arXiv:2404.04656, whose delta is a running mean of rewards.
    """
    chosen, rejected = _rewards(sums, beta)
    return -F.logsigmoid(chosen - delta) - F.logsigmoid(delta - rejected)


@preference_loss()
def discopop_loss(sums: PreferenceSums, *, beta: float = 0.1, tau: float = 0.05) -> Tensor:
    """-(1 - m) S(x) + m e^{-x},  x = beta d,  m = s(x / tau).

    Source: Lu et al. 2024, arXiv:2406.08414.
    """
    _require_positive("tau", tau)
    logits = beta * sums.gaps
    # m e^{-x} as one exponential, which stays finite where e^{-x} alone does not.
    exponential = (F.logsigmoid(logits / tau) - logits).exp()
    return exponential - (-logits / tau).sigmoid() * F.logsigmoid(logits)


@preference_loss(couples_pairs=True)
def aot_loss(sums: PreferenceSums, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) S(beta x) - e S(-beta x),  x = sort(c - r) - sort(cr - rr) over the step.

    Source: Melnyk et al. 2024, arXiv:2406.05882.

    Raises:
        ValueError: e is not in [0, 0.5).
    """
    policy = (sums.chosen.logprobs - sums.rejected.logprobs).sort().values
    reference = (sums.chosen.ref_logprobs - sums.rejected.ref_logprobs).sort().values
    return _smoothed(beta * (policy - reference), label_smoothing)


@preference_loss(couples_pairs=True)
def aot_unpaired_loss(
    sums: PreferenceSums, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """Return the loss `aot` with x = sort(u) - sort(v)."""
    chosen, rejected = sums.chosen.log_ratios.sort(), sums.rejected.log_ratios.sort()
    return _smoothed(beta * (chosen.values - rejected.values), label_smoothing)


@preference_loss(is_of_answers=True, uses_kl=True)
def kto_loss(
    sums: PreferenceSums,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """w_d (1 - s(beta (u - z))) of a good answer, w_u (1 - s(beta (z - v))) of another.

    z is the mean log-ratio of answers to other prompts, at least 0.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306.
    """
    good = 1 - (beta * (sums.chosen.log_ratios - sums.kl)).sigmoid()
    other = 1 - (beta * (sums.kl - sums.rejected.log_ratios)).sigmoid()
    return torch.cat([desirable_weight * good, undesirable_weight * other])


@preference_loss(uses_reference=False, is_per_token=True)
def simpo_loss(sums: PreferenceSums, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """-S(beta (c / n_c - r / n_r) - gamma).

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """
    gaps = sums.chosen.mean_logprobs - sums.rejected.mean_logprobs
    return -F.logsigmoid(beta * gaps - gamma)


@preference_loss(uses_reference=False)
def cpo_loss(sums: PreferenceSums, *, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    """-S(beta (c - r)) + alpha * `sft_loss`.

    Source: Xu et al. 2024, arXiv:2401.08417.
    """
    gaps = sums.chosen.logprobs - sums.rejected.logprobs
    return alpha * sft_loss(sums) - F.logsigmoid(beta * gaps)


@preference_loss(uses_reference=False, is_per_token=True)
def orpo_loss(sums: PreferenceSums, *, beta: float = 0.1) -> Tensor:
    """`sft_loss` - beta S(x - y),  x = log odds of c / n_c,  y of r / n_r.

    log odds of z: z - log(1 - e^z).

    Source: Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7.
    """
    odds = log_odds(sums.chosen.mean_logprobs) - log_odds(sums.rejected.mean_logprobs)
    return sft_loss(sums) - beta * F.logsigmoid(odds)


@preference_loss(uses_reference=False)
def sft_loss(sums: PreferenceSums) -> Tensor:
    """-c / mean n_c: over the step, the mean over the tokens of chosen answers."""
    return -sums.chosen.logprobs / sums.tokens_per_chosen


def _rewards(sums: PreferenceSums, beta: float) -> tuple[Tensor, Tensor]:
    """Return both rewards: beta u and beta v."""
    return beta * sums.chosen.log_ratios, beta * sums.rejected.log_ratios


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    share = _share(label_smoothing)
    return -(1 - share) * F.logsigmoid(logits) - share * F.logsigmoid(-logits)


def _share(label_smoothing: float) -> float:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5): got {label_smoothing}")
    return label_smoothing


def _require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be positive: got {value}")


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """Log odds z - log(1 - e^z) for z < 0, accurate near 0 and far from it."""
    tiny = torch.finfo(mean_logprobs.dtype).tiny
    z = mean_logprobs.clamp(max=-tiny)
    is_near = z > -math.log(2)
    # The branch that is not taken gets a harmless number, or its gradient would be NaN.
    near = torch.where(is_near, z, -1.0).expm1().neg().log()
    far = torch.log1p(-torch.where(is_near, -1.0, z).exp())
    return z - torch.where(is_near, near, far)

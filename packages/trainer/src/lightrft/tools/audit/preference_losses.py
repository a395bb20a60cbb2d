"""Preference losses by their definitions, from summed log-probabilities of answers.

c and r are summed log-probabilities of the chosen and the rejected answer, cr and rr the same under
the reference, n_c and n_r numbers of tokens; u = c - cr, v = r - rr.

Sources: papers in the docstrings, with the conventions of docs/prefer.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid as log_sigmoid

Settings = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Answers:
    """Summed log-probabilities of chosen or of rejected answers.

    Args:
        exact, reference: Recomputed sums of the policy and the reference: [answers].
        tokens: Number of tokens: [answers].
        seen, seen_reference: Sums of the run: [answers]; they order values that are equal up to
            rounding.
    """

    exact: Tensor
    reference: Tensor
    tokens: Tensor
    seen: Tensor
    seen_reference: Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """Chosen and rejected answers in the same order, and numbers of the step.

    Args:
        chosen, rejected: See `Answers`.
        mean_tokens: Mean number of tokens of chosen answers.
        z: Mean log-ratio of answers behind other prompts.
        doubt: Rounding of a sum.
    """

    chosen: Answers
    rejected: Answers
    mean_tokens: float
    z: float
    doubt: float

    @property
    def u(self) -> Tensor:
        """Log-ratios of chosen answers."""
        return self.chosen.exact - self.chosen.reference

    @property
    def v(self) -> Tensor:
        """Log-ratios of rejected answers."""
        return self.rejected.exact - self.rejected.reference

    @property
    def mean_ratios(self) -> Tensor:
        """Difference u / n_c - v / n_r."""
        return self.u / self.chosen.tokens - self.v / self.rejected.tokens

    @property
    def mean_logprobs(self) -> tuple[Tensor, Tensor]:
        """Mean log-probabilities c / n_c and r / n_r."""
        return self.chosen.exact / self.chosen.tokens, self.rejected.exact / self.rejected.tokens

    def in_order(self, values: Tensor, seen: Tensor) -> Tensor:
        """Sort values; those equal up to rounding stay in the run's order."""
        ordered = values[torch.argsort(seen, stable=True)]
        if bool((ordered.diff() < -4 * self.doubt).any()):
            ordered = values[torch.argsort(values, stable=True)]
        return ordered


def dpo(p: Pairs, settings: Settings) -> Tensor:
    """Follow Rafailov et al. 2023, arXiv:2305.18290, eq. 7."""
    return -log_sigmoid(settings["beta"] * (p.u - p.v))


def cdpo(p: Pairs, settings: Settings) -> Tensor:
    """Follow Mitchell 2023: labels are wrong with probability e."""
    return _noisy(settings["beta"] * (p.u - p.v), settings["label_smoothing"])


def robust(p: Pairs, settings: Settings) -> Tensor:
    """Follow Chowdhury et al. 2024, arXiv:2403.00409, eq. 9."""
    x, e = settings["beta"] * (p.u - p.v), settings["label_smoothing"]
    return (-(1 - e) * log_sigmoid(x) + e * log_sigmoid(-x)) / (1 - 2 * e)


def hinge(p: Pairs, settings: Settings) -> Tensor:
    """Follow Zhao et al. 2023, arXiv:2305.10425, on log-ratios."""
    return torch.relu(1 - settings["beta"] * (p.u - p.v))


def ipo(p: Pairs, settings: Settings) -> Tensor:
    """Follow Azar et al. 2023, arXiv:2310.12036, eq. 17, means over tokens."""
    return (p.mean_ratios - 0.5 / settings["beta"]) ** 2


def dpo_norm(p: Pairs, settings: Settings) -> Tensor:
    """Follow Lambert et al. 2024, arXiv:2411.15124, eq. 6."""
    return -log_sigmoid(settings["beta"] * p.mean_ratios)


def exo(p: Pairs, settings: Settings) -> Tensor:
    """Follow Ji et al. 2024, arXiv:2402.00856, eq. 17: KL of (s(x), s(-x)) from (1 - e, e)."""
    x, e = settings["beta"] * (p.u - p.v), settings["label_smoothing"]
    right = torch.sigmoid(x) * (log_sigmoid(x) - math.log(1 - e))
    return right + torch.sigmoid(-x) * (log_sigmoid(-x) - math.log(e))


def nca(p: Pairs, settings: Settings) -> Tensor:
    """Follow Chen et al. 2024, arXiv:2402.05369."""
    b = settings["beta"]
    return -log_sigmoid(b * p.u) - (log_sigmoid(-b * p.u) + log_sigmoid(-b * p.v)) / 2


def sppo(p: Pairs, settings: Settings) -> Tensor:
    """Follow Wu et al. 2024, arXiv:2405.00675, chances of winning 1 and 0."""
    half = 0.5 / settings["beta"]
    return (p.u - half) ** 2 + (p.v + half) ** 2


def apo_zero(p: Pairs, settings: Settings) -> Tensor:
    """Follow D'Oosterlinck et al. 2024, arXiv:2408.06266."""
    return 1 - torch.sigmoid(settings["beta"] * p.u) + torch.sigmoid(settings["beta"] * p.v)


def apo_zero_unpaired(p: Pairs, settings: Settings) -> Tensor:
    """Compute the terms of `apo_zero` for each answer."""
    good, other = torch.sigmoid(settings["beta"] * p.u), torch.sigmoid(settings["beta"] * p.v)
    return torch.cat([1 - good, other])


def apo_down(p: Pairs, settings: Settings) -> Tensor:
    """Follow D'Oosterlinck et al. 2024, arXiv:2408.06266."""
    return torch.sigmoid(settings["beta"] * p.u) + 1 - torch.sigmoid(settings["beta"] * (p.u - p.v))


def bco(p: Pairs, settings: Settings) -> Tensor:
    """Follow Jung et al. 2024, arXiv:2404.04656, delta constant."""
    b, delta = settings["beta"], settings["delta"]
    return -log_sigmoid(b * p.u - delta) - log_sigmoid(delta - b * p.v)


def discopop(p: Pairs, settings: Settings) -> Tensor:
    """Follow Lu et al. 2024, arXiv:2406.08414, the log-ratio modulated loss."""
    x = settings["beta"] * (p.u - p.v)
    log_share = log_sigmoid(x / settings["tau"])
    return torch.exp(log_share - x) - (1 - torch.exp(log_share)) * log_sigmoid(x)


def aot(p: Pairs, settings: Settings) -> Tensor:
    """Follow Melnyk et al. 2024, arXiv:2406.05882, paired: quantiles of margins."""
    c, r = p.chosen, p.rejected
    policy = p.in_order(c.exact - r.exact, c.seen - r.seen)
    reference = p.in_order(c.reference - r.reference, c.seen_reference - r.seen_reference)
    return _noisy(settings["beta"] * (policy - reference), settings["label_smoothing"])


def aot_unpaired(p: Pairs, settings: Settings) -> Tensor:
    """Compute `aot` without pairs: quantiles of log-ratios."""
    c, r = p.chosen, p.rejected
    gaps = p.in_order(p.u, c.seen - c.seen_reference) - p.in_order(p.v, r.seen - r.seen_reference)
    return _noisy(settings["beta"] * gaps, settings["label_smoothing"])


def kto(p: Pairs, settings: Settings) -> Tensor:
    """Follow Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7 and 8."""
    b = settings["beta"]
    good = settings["desirable_weight"] * (1 - torch.sigmoid(b * (p.u - p.z)))
    other = settings["undesirable_weight"] * (1 - torch.sigmoid(b * (p.z - p.v)))
    return torch.cat([good, other])


def simpo(p: Pairs, settings: Settings) -> Tensor:
    """Follow Meng et al. 2024, arXiv:2405.14734, eq. 6."""
    chosen, rejected = p.mean_logprobs
    return -log_sigmoid(settings["beta"] * (chosen - rejected) - settings["gamma"])


def cpo(p: Pairs, settings: Settings) -> Tensor:
    """Follow Xu et al. 2024, arXiv:2401.08417, eq. 3, the second term per chosen token."""
    x = settings["beta"] * (p.chosen.exact - p.rejected.exact)
    return settings["alpha"] * sft(p, {}) - log_sigmoid(x)


def orpo(p: Pairs, settings: Settings) -> Tensor:
    """Follow Hong et al. 2024, arXiv:2403.07691, eqs. 5 to 7."""
    chosen, rejected = (each - (-torch.expm1(each)).log() for each in p.mean_logprobs)
    return sft(p, {}) - settings["beta"] * log_sigmoid(chosen - rejected)


def sft(p: Pairs, _: Settings) -> Tensor:
    """Return each pair's share of the mean over tokens of chosen answers."""
    return -p.chosen.exact / p.mean_tokens


def _noisy(x: Tensor, share: float) -> Tensor:
    return -(1 - share) * log_sigmoid(x) - share * log_sigmoid(-x)


@dataclass(frozen=True, slots=True)
class PairFormula:
    """Built-in preference loss.

    Args:
        function: Values of the loss.
        defaults: Hyper-parameters by name.
        has_reference: True if the loss reads log-probabilities of the reference.
        of_answers: True if the loss has one value per answer, not per pair.
    """

    function: Callable[[Pairs, Settings], Tensor]
    defaults: Settings
    has_reference: bool = True
    of_answers: bool = False


_BETA = {"beta": 0.1}
_EVEN, _SMOOTH = {**_BETA, "label_smoothing": 0.0}, {**_BETA, "label_smoothing": 0.1}
_KTO = {**_BETA, "desirable_weight": 1.0, "undesirable_weight": 1.0}
PREFERENCE_LOSSES: Mapping[str, PairFormula] = {
    "dpo": PairFormula(dpo, _BETA),
    "cdpo": PairFormula(cdpo, _SMOOTH),
    "robust": PairFormula(robust, _SMOOTH),
    "hinge": PairFormula(hinge, _BETA),
    "ipo": PairFormula(ipo, _BETA),
    "dpo_norm": PairFormula(dpo_norm, _BETA),
    "exo": PairFormula(exo, {**_BETA, "label_smoothing": 1e-3}),
    "nca": PairFormula(nca, _BETA),
    "sppo": PairFormula(sppo, _BETA),
    "apo_zero": PairFormula(apo_zero, _BETA),
    "apo_zero_unpaired": PairFormula(apo_zero_unpaired, _BETA, of_answers=True),
    "apo_down": PairFormula(apo_down, _BETA),
    "bco": PairFormula(bco, {**_BETA, "delta": 0.0}),
    "discopop": PairFormula(discopop, {**_BETA, "tau": 0.05}),
    "aot": PairFormula(aot, _EVEN),
    "aot_unpaired": PairFormula(aot_unpaired, _EVEN),
    "kto": PairFormula(kto, _KTO, of_answers=True),
    "simpo": PairFormula(simpo, {"beta": 2.0, "gamma": 1.0}, has_reference=False),
    "cpo": PairFormula(cpo, {**_BETA, "alpha": 1.0}, has_reference=False),
    "orpo": PairFormula(orpo, _BETA, has_reference=False),
    "sft": PairFormula(sft, {}, has_reference=False),
}
# Names in TRL.
OTHER_NAMES = {
    "sigmoid": "dpo",
    "sigmoid_norm": "dpo_norm",
    "exo_pair": "exo",
    "nca_pair": "nca",
    "sppo_hard": "sppo",
    "bco_pair": "bco",
}


def preference_loss_named(name: str) -> PairFormula | None:
    """Return the built-in loss with this name; None if it is user-defined."""
    return PREFERENCE_LOSSES.get(OTHER_NAMES.get(name, name))

"""Policy losses, KL terms and the value loss; autograd computes their derivatives.

p are log-probabilities under the trained policy, q under the policy at the start of the step.

Sources: papers in the docstrings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightrft.tools.audit.pairs import HELD, Draw, Pair, row_lengths, with_slope_of

MAX_K3 = 10.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one micro batch.

    Args:
        p, q: Log-probabilities of the trained and the old policy: [rows, seq].
        advantages: [rows, seq].
        mask: [rows, seq] bool.
        draw: Draw that decides at bounds.
    """

    p: Pair
    q: Pair
    advantages: Tensor
    mask: Tensor
    draw: Draw

    @property
    def difference(self) -> Pair:
        """Difference p - q inside the mask, 0 outside."""
        return self.p.less(self.q, self.mask)

    @property
    def mean_difference(self) -> Pair:
        """Mean of p - q over the tokens of each row, at each token."""
        return self.difference.map(self.row_mean)

    def row_mean(self, values: Tensor) -> Tensor:
        """Return the mean of each row, repeated for each token: [rows, seq]."""
        total = values.sum(dim=1, keepdim=True)
        return (total / row_lengths(self.mask)).expand_as(values)


# One value per token, differentiable by p; hyper-parameters are further arguments.
Loss = Callable[..., Tensor]


def _ratio(difference: Tensor) -> Tensor:
    """Return the exponential of the difference clamped to +-20."""
    return difference.clamp(-HELD, HELD).exp()


def _beyond(batch: Batch, value: Pair, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return where A > 0 and value > `high`, and where A < 0 and value < `low`."""
    advantages, draw = batch.advantages, batch.draw
    is_high = (advantages > 0) & draw.above(value, high)
    return is_high, (advantages < 0) & ~draw.at_least(value, low)


def _bounded(batch: Batch, value: Pair, low: float, high: float) -> Tensor:
    """Replace the value by a bound where it is `_beyond` that bound."""
    is_high, is_low = _beyond(batch, value, low, high)
    return torch.where(is_high, high, torch.where(is_low, low, value.exact))


def _surrogate(
    batch: Batch, ratio: Pair, clip_low: float, clip_high: float, cap: float = math.inf
) -> Tensor:
    """Return -min(r A, clip(r) A), with r capped for negative A."""
    bounded = _bounded(batch, ratio, 1 - clip_low, 1 + clip_high)
    is_capped = (batch.advantages < 0) & batch.draw.above(ratio, cap)
    return -torch.where(is_capped, cap, bounded) * batch.advantages


def ppo(
    batch: Batch, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = math.inf
) -> Tensor:
    """Follow Schulman et al. 2017, arXiv:1707.06347, eq. 7; Ye et al. 2019, arXiv:1912.09729."""
    return _surrogate(batch, batch.difference.map(_ratio), clip_low, clip_high, dual_clip)


def gspo(batch: Batch, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    """Follow Zheng et al. 2025, arXiv:2507.18071, eq. 5: one ratio per row."""
    return _surrogate(batch, batch.mean_difference.map(_ratio), clip_low, clip_high)


def gspo_token(batch: Batch, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    """Follow the paper of `gspo`, sec. 4.3: each token's gradient uses its advantage."""
    mean = batch.mean_difference
    by_token = Pair(with_slope_of(mean.exact, batch.p.exact), mean.run)
    return _surrogate(batch, by_token.map(_ratio), clip_low, clip_high)


def gmpo(batch: Batch, max_log_ratio: float = 0.4, max_log_fall: float | None = None) -> Tensor:
    """Follow Zhao et al. 2025, arXiv:2507.20673: geometric mean of bounded ratios."""
    fall = max_log_ratio if max_log_fall is None else max_log_fall
    bounded = _bounded(batch, batch.difference, -fall, max_log_ratio)
    return -_ratio(batch.row_mean(bounded)) * batch.advantages


def cpgd(
    batch: Batch,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    drift_coef: float = 0.001,
    drift_cap: float = 2.0,
) -> Tensor:
    """Follow Liu et al. 2025, arXiv:2505.12504: clipped log-ratio, and a drift term."""
    bounded = _bounded(batch, batch.difference, math.log(1 - clip_low), math.log(1 + clip_high))
    drift = (_ratio(batch.difference.exact) - 1).clamp(max=drift_cap).detach()
    return drift_coef * drift * batch.p.exact - (batch.q.exact + bounded) * batch.advantages


def cispo(batch: Batch, clip_low: float = 1.0, clip_high: float = 0.28) -> Tensor:
    """Follow MiniMax-M1 2025, arXiv:2506.13585, eqs. 4 and 5."""
    weight = _ratio(batch.difference.exact).detach().clamp(1 - clip_low, 1 + clip_high)
    return -weight * batch.advantages * batch.p.exact


def sapo(
    batch: Batch, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> Tensor:
    """Follow Gao et al. 2025, arXiv:2511.20347: a sigmoid gate."""
    return _gate(batch, batch.difference, temperature_positive, temperature_negative)


def sapo_sequence(
    batch: Batch, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> Tensor:
    """Apply the gate of `sapo` to one ratio per row, the geometric mean."""
    return _gate(batch, batch.mean_difference, temperature_positive, temperature_negative)


def ppo_sequence(batch: Batch, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """Follow Ahmadian et al. 2024, arXiv:2402.14740: a response is one action."""
    lengths = row_lengths(batch.mask)
    ratio = batch.mean_difference.map(lambda mean: _ratio(mean * lengths))
    return _surrogate(batch, ratio, clip_low, clip_high)


def dro(batch: Batch, penalty: float = 0.1) -> Tensor:
    """Follow Richemond et al. 2024, arXiv:2405.19107, token by token."""
    return penalty * batch.difference.exact**2 / 2 - batch.p.exact * batch.advantages


def _gate(batch: Batch, difference: Pair, positive: float, negative: float) -> Tensor:
    """Return -4 / tau sigmoid(tau (r - 1)) A."""
    advantages = batch.advantages
    tau = torch.where(advantages > 0, positive, torch.full_like(advantages, negative))
    return -4 / tau * torch.sigmoid(tau * (_ratio(difference.exact) - 1)) * advantages


def reinforce(batch: Batch) -> Tensor:
    """Follow Williams 1992."""
    return -batch.advantages * batch.p.exact


def clip_cov(
    batch: Batch,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """Follow Cui et al. 2025, arXiv:2505.22617, with a systematic draw of the tokens left out."""
    covariance, draw = _covariance(batch), batch.draw
    is_high, is_low = _beyond(batch, batch.difference.map(_ratio), 1 - clip_low, 1 + clip_high)
    is_candidate = batch.mask & ~is_high & ~is_low & draw.above(covariance, cov_low)
    candidates = (is_candidate & ~draw.at_least(covariance, cov_high)).nonzero()
    count = min(_share(batch, cov_ratio), len(candidates))
    kept = torch.ones_like(batch.mask)
    for k in range(count):
        row, t = candidates[(2 * k + 1) * len(candidates) // (2 * count)]
        kept[row, t] = False
    return torch.where(kept, ppo(batch, clip_low, clip_high), 0.0)


def kl_cov(batch: Batch, cov_ratio: float = 2e-3, kl_coef: float = 1.0) -> Tensor:
    """Follow the paper of `clip_cov`: |p - q| on the tokens of highest covariance."""
    count, d = _share(batch, cov_ratio), batch.difference
    highest = batch.draw.highest(_covariance(batch).at(batch.mask), count)
    rows, places = batch.mask.nonzero()[highest].T
    coef = torch.zeros_like(batch.advantages)
    coef[rows, places] = kl_coef
    return coef * _size(d, batch.draw) - _ratio(d.exact) * batch.advantages


def _covariance(batch: Batch) -> Pair:
    mask, count = batch.mask, max(int(batch.mask.sum()), 1)

    def centred(values: Tensor) -> Tensor:
        inside = torch.where(mask, values, 0.0)
        return inside - inside.sum() / count

    advantages = centred(batch.advantages)
    return batch.p.map(lambda p: torch.where(mask, centred(p.detach()) * advantages, 0.0))


def _share(batch: Batch, ratio: float) -> int:
    count = int(batch.mask.sum())
    return 0 if ratio == 0 else min(max(1, int(ratio * count + 1e-9)), count)


def _size(value: Pair, draw: Draw) -> Tensor:
    """Return |value|; near 0 its derivative takes the sign of the run's value."""
    return with_slope_of(value.exact.abs(), draw.sign_of(value) * value.exact)


_TOKEN_MEAN, _MEAN_OF_MEANS = "token-mean", "seq-mean-token-mean"
# Loss, and the aggregation of its paper.
POLICY_LOSSES: Mapping[str, tuple[Loss, str]] = {
    "ppo": (ppo, _MEAN_OF_MEANS),
    "clipped": (ppo, _MEAN_OF_MEANS),
    "dapo": (partial(ppo, clip_high=0.28), _TOKEN_MEAN),
    "dr_grpo": (ppo, "seq-mean-token-sum-norm"),
    "gspo": (gspo, _MEAN_OF_MEANS),
    "gspo-token": (gspo_token, _MEAN_OF_MEANS),
    "gmpo": (gmpo, _MEAN_OF_MEANS),
    "cpgd": (cpgd, _MEAN_OF_MEANS),
    "cispo": (cispo, _TOKEN_MEAN),
    "sapo": (sapo, _MEAN_OF_MEANS),
    "clip_cov": (clip_cov, _TOKEN_MEAN),
    "kl_cov": (kl_cov, _TOKEN_MEAN),
    "reinforce": (reinforce, _TOKEN_MEAN),
    "dro": (dro, _TOKEN_MEAN),
    "ppo-sequence": (ppo_sequence, _MEAN_OF_MEANS),
    "sapo-sequence": (sapo_sequence, _MEAN_OF_MEANS),
}


def kl_term(name: str, p: Pair, reference: Pair, q: Pair, mask: Tensor, draw: Draw) -> Tensor:
    """Estimate KL(policy || reference) per token.

    Source: Schulman, "Approximating KL divergence"; k3_is: DeepSeek-V3.2, arXiv:2512.02556.
    Estimators with + have the value of their name and the gradient of the divergence itself.
    """
    d = p.less(reference, mask)
    k3, squared = d.map(_k3), d.exact**2 / 2
    if name == "abs":
        return _size(d, draw)
    if name == "k3":
        return torch.where(draw.above(k3, MAX_K3), MAX_K3, k3.exact)
    kind, bounded_k3 = name.removesuffix("+").removesuffix("_is"), k3.exact.clamp(max=MAX_K3)
    values = {"k1": d.exact, "k2": squared, "k3": bounded_k3, "k3_unclamped": k3.exact}[kind]
    if kind == name:
        return values
    if name.endswith("+"):
        return with_slope_of(values, squared)
    weight = _ratio(p.less(q, mask).exact).detach()
    # The divergence has the gradient of k2. For k1_is both factors are differentiated.
    return with_slope_of(weight * values, weight * (squared + (d.exact if kind == "k1" else 0.0)))


def _k3(d: Tensor) -> Tensor:
    held = d.clamp(-HELD, HELD)
    return torch.expm1(-held) + held


def value_term(
    values: Pair, old: Pair, returns: Tensor, mask: Tensor, *, clip: float, draw: Draw
) -> Tensor:
    """Return half the larger squared error of the free and the clipped value; clip 0 is off."""
    free_error = torch.where(mask, values.exact - returns, 0.0) ** 2
    if clip <= 0:
        return free_error / 2
    change = values.less(old, mask)
    is_up, is_down = draw.above(change, clip), ~draw.at_least(change, -clip)
    held = old.exact + torch.where(is_up, clip, torch.where(is_down, -clip, change.exact))
    held_error = torch.where(mask, held - returns, 0.0) ** 2
    uses_held = (is_up | is_down) & (held_error > free_error)
    return torch.where(uses_held, held_error, free_error) / 2


def token_shares(mask: Tensor, mode: str) -> Tensor:
    """Return u_i of every token: [rows, seq]."""
    return mask / row_lengths(mask) if mode == "seq-mean-token-mean" else mask.double()


def normalizer(mask: Tensor, mode: str, budget: int) -> float:
    """Return Z: tokens, rows with tokens, or these rows times the run's response budget."""
    if mode == "token-mean":
        return float(mask.sum())
    num_rows = float(mask.any(dim=1).sum())
    return num_rows * budget if mode == "seq-mean-token-sum-norm" else num_rows

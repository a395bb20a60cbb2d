"""Policy losses, KL terms and the value loss: values and derivatives, written out by hand.

p are log-probabilities under the trained policy, q under that of the start of the step.

Sources: formulas and papers as in the docstrings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lightrft.tools.audit.corrections import HELD, Borders, Pair, row_lengths
from lightrft.tools.audit.record import Array, Flags

MAX_K3 = 10.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one micro batch.

    Args:
        p, q: [rows, seq] of the trained policy and of the old one.
        advantages: [rows, seq].
        mask: [rows, seq] bool.
        weights: [rows, seq], what each token's value is multiplied with in the sum.
        borders: Decides at bounds.
    """

    p: Pair
    q: Pair
    advantages: Array
    mask: Flags
    weights: Array
    borders: Borders

    @property
    def difference(self) -> Pair:
        """P - q inside the mask, 0 outside."""
        return self.p.less(self.q, self.mask)


@dataclass(frozen=True, slots=True)
class Term:
    """A loss, token by token.

    Args:
        value: [rows, seq].
        slope: [rows, seq], derivative of each value by its own log-probability; where the tokens
            of a row share a ratio, of the weighted sum of the row's values by each of them.
    """

    value: Array
    slope: Array

    def times(self, factor: Array | float) -> Term:
        """Values and slopes, each times the factor."""
        return Term(self.value * factor, self.slope * factor)

    def distance(self, other: Term) -> Term:
        """Differences of values and of slopes, without their signs."""
        return Term(np.abs(self.value - other.value), np.abs(self.slope - other.slope))

    def largest(self, other: Term) -> Term:
        """The larger one of two values and of two slopes."""
        return Term(np.maximum(self.value, other.value), np.maximum(self.slope, other.slope))

    def plus(self, other: Term) -> Term:
        """The sums of values and of slopes."""
        return Term(self.value + other.value, self.slope + other.slope)

    def inside(self, mask: Flags) -> Term:
        """0 outside the mask."""
        return Term(np.where(mask, self.value, 0.0), np.where(mask, self.slope, 0.0))


Options = Mapping[str, float]
Loss = Callable[[Batch, Options], Term]


def _held(value: Pair) -> tuple[Pair, Flags]:
    """Within +-20, and where that does not act."""
    return value.map(lambda each: np.clip(each, -HELD, HELD)), np.abs(value.own) <= HELD


def _ratio(difference: Pair) -> tuple[Pair, Flags]:
    """The exponential of what is held, and where that does not act."""
    held, is_free = _held(difference)
    return held.map(np.exp), is_free


def _beyond(batch: Batch, value: Pair, low: float, high: float) -> tuple[Flags, Flags]:
    """Above `high` with a positive advantage, and below `low` with a negative one."""
    advantages, borders = batch.advantages, batch.borders
    is_high = (advantages > 0) & borders.above(value, high)
    return is_high, (advantages < 0) & ~borders.at_least(value, low)


def _surrogate(batch: Batch, difference: Pair, given: Options) -> Term:
    """-min(r A, clip(r) A) of ratios that are capped with negative A; derivative by ln r."""
    ratio, is_free = _ratio(difference)
    low, high, cap = 1 - given["clip_low"], 1 + given["clip_high"], given.get("dual_clip", math.inf)
    is_high, is_low = _beyond(batch, ratio, low, high)
    is_capped = (batch.advantages < 0) & batch.borders.above(ratio, cap)
    bounded = np.select([is_high, is_low, is_capped], [high, low, cap], ratio.own)
    is_bound = is_high | is_low | is_capped | ~is_free
    slope = np.where(is_bound, 0.0, -ratio.own * batch.advantages)
    return Term(-bounded * batch.advantages, slope)


def ppo(batch: Batch, given: Options) -> Term:
    """Schulman et al. 2017, arXiv:1707.06347, eq. 7; Ye et al. 2019, arXiv:1912.09729."""
    return _surrogate(batch, batch.difference, given)


def gspo(batch: Batch, given: Options) -> Term:
    """Zheng et al. 2025, arXiv:2507.18071, eq. 5: one ratio a row."""
    found = gspo_token(batch, given)
    return Term(found.value, _shared(batch, found.slope))


def gspo_token(batch: Batch, given: Options) -> Term:
    """The same, sec. 4.3: the gradient of a token is that of its own advantage."""
    return _surrogate(batch, _row_mean(batch, batch.difference), given)


def _row_mean(batch: Batch, values: Pair) -> Pair:
    lengths = row_lengths(batch.mask)
    return values.map(lambda x: np.zeros(x.shape) + x.sum(axis=1, keepdims=True) / lengths)


def _shared(batch: Batch, slopes: Array) -> Array:
    """Each of a row's L values depends on the mean, and the mean on each token by 1 / L."""
    total = (batch.weights * slopes).sum(axis=1, keepdims=True)
    return np.asarray(np.broadcast_to(total / row_lengths(batch.mask), slopes.shape))


def gmpo(batch: Batch, given: Options) -> Term:
    """Zhao et al. 2025, arXiv:2507.20673: geometric mean of bounded ratios."""
    high, advantages, d = given["max_log_ratio"], batch.advantages, batch.difference
    low = -given.get("max_log_fall", high)
    is_high, is_low = _beyond(batch, d, low, high)
    is_held = is_high | is_low
    limit = np.where(advantages > 0, high, low)
    ratio, is_free = _ratio(_row_mean(batch, d.map(lambda x: np.where(is_held, limit, x))))
    loss = np.where(batch.mask, -ratio.own * advantages, 0.0)
    return Term(loss, np.where(is_held | ~is_free, 0.0, _shared(batch, loss)))


def cpgd(batch: Batch, given: Options) -> Term:
    """Liu et al. 2025, arXiv:2505.12504: clipped log-ratio, and a drift term."""
    advantages, d = batch.advantages, batch.difference
    low, high = np.log(1 - given["clip_low"]), np.log(1 + given["clip_high"])
    is_high, is_low = _beyond(batch, d, low, high)
    bounded = np.select([is_high, is_low], [high, low], d.own)
    drift = given["drift_coef"] * np.minimum(_ratio(d)[0].own - 1, given["drift_cap"])
    value = -(batch.q.own + bounded) * advantages + drift * batch.p.own
    return Term(value, np.where(is_high | is_low, 0.0, -advantages) + drift)


def cispo(batch: Batch, given: Options) -> Term:
    """MiniMax-M1 2025, arXiv:2506.13585, eqs. 4 and 5."""
    ratio = _ratio(batch.difference)[0].own
    weight = np.clip(ratio, 1 - given["clip_low"], 1 + given["clip_high"])
    return Term(-weight * batch.advantages * batch.p.own, -weight * batch.advantages)


def sapo(batch: Batch, given: Options) -> Term:
    """Gao et al. 2025, arXiv:2511.20347: a sigmoid gate."""
    return _gate(batch, batch.difference, given)


def sapo_sequence(batch: Batch, given: Options) -> Term:
    """The same on one ratio a row, the geometric mean."""
    found = _gate(batch, _row_mean(batch, batch.difference), given)
    return Term(found.value, _shared(batch, found.slope))


def ppo_sequence(batch: Batch, given: Options) -> Term:
    """Ahmadian et al. 2024, arXiv:2402.14740: a response is one action."""
    lengths = row_lengths(batch.mask)
    product = _row_mean(batch, batch.difference).map(lambda mean: mean * lengths)
    found = _surrogate(batch, product, given)
    return Term(found.value, _shared(batch, found.slope) * lengths)


def dro(batch: Batch, given: Options) -> Term:
    """Richemond et al. 2024, arXiv:2405.19107, token by token."""
    d, pull = batch.difference.own, given["penalty"]
    value = -batch.p.own * batch.advantages + pull * d**2 / 2
    return Term(value, pull * d - batch.advantages)


def _gate(batch: Batch, difference: Pair, given: Options) -> Term:
    """-4 / tau sigmoid(tau (r - 1)) A; derivative by ln r."""
    advantages, (ratio, is_free) = batch.advantages, _ratio(difference)
    positive, negative = given["temperature_positive"], given["temperature_negative"]
    tau = np.where(advantages > 0, positive, negative)
    with np.errstate(over="ignore"):
        gate = 1 / (1 + np.exp(-tau * (ratio.own - 1)))
    slope = np.where(is_free, -4 * gate * (1 - gate) * ratio.own * advantages, 0.0)
    return Term(-4 / tau * gate * advantages, slope)


def reinforce(batch: Batch, _: Options) -> Term:
    """Williams 1992."""
    return Term(-batch.advantages * batch.p.own, -batch.advantages)


def clip_cov(batch: Batch, given: Options) -> Term:
    """Cui et al. 2025, arXiv:2505.22617, with a systematic draw of the tokens left out."""
    covariance, borders = _covariance(batch), batch.borders
    low, high = 1 - given["clip_low"], 1 + given["clip_high"]
    is_high, is_low = _beyond(batch, _ratio(batch.difference)[0], low, high)
    is_candidate = batch.mask & ~is_high & ~is_low & borders.above(covariance, given["cov_low"])
    is_candidate &= ~borders.at_least(covariance, given["cov_high"])
    candidates = np.flatnonzero(is_candidate)
    count = min(_share(batch, given["cov_ratio"]), len(candidates))
    kept = np.ones(batch.mask.shape, dtype=np.bool_)
    for k in range(count):
        kept.flat[candidates[(2 * k + 1) * len(candidates) // (2 * count)]] = False
    return ppo(batch, given).inside(kept)


def kl_cov(batch: Batch, given: Options) -> Term:
    """The same paper: |p - q| on the tokens of highest covariance."""
    ratio, is_free = _ratio(batch.difference)
    own, count = ratio.own * batch.advantages, _share(batch, given["cov_ratio"])
    highest = batch.borders.highest(_covariance(batch).at(batch.mask), count)
    coef = np.zeros(batch.mask.shape)
    coef.flat[np.flatnonzero(batch.mask)[highest]] = given["kl_coef"]
    slope = np.where(is_free, -own, 0.0) + coef * _sign(batch.difference, batch.borders)
    return Term(-own + coef * np.abs(batch.difference.own), slope)


def _covariance(batch: Batch) -> Pair:
    mask, count = batch.mask, max(int(batch.mask.sum()), 1)

    def centred(values: Array) -> Array:
        inside = np.where(mask, values, 0.0)
        return np.asarray(inside - inside.sum() / count)

    advantages = centred(batch.advantages)
    return batch.p.map(lambda p: np.where(mask, centred(p) * advantages, 0.0))


def _share(batch: Batch, ratio: float) -> int:
    count = int(batch.mask.sum())
    return 0 if ratio == 0 else min(max(1, int(ratio * count + 1e-9)), count)


def _sign(value: Pair, borders: Borders) -> Array:
    return 1.0 * borders.above(value, 0.0) - 1.0 * ~borders.at_least(value, 0.0)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A built-in policy loss.

    Args:
        function: Its value and derivative.
        aggregation: Of its paper.
        defaults: Hyper-parameters by name.
        shares_rows: The tokens of a row share one ratio.
    """

    function: Loss
    aggregation: str
    defaults: Options
    shares_rows: bool = False

    def term(self, batch: Batch, given: Options) -> Term:
        """The weighted values, and the derivative of their sum by each log-probability."""
        found = self.function(batch, given).inside(batch.mask)
        slope = found.slope if self.shares_rows else found.slope * batch.weights
        return Term(found.value * batch.weights, slope)


_MEAN_OF_MEANS, _TOKEN_MEAN = "seq-mean-token-mean", "token-mean"
_PPO = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": math.inf}
_GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
_SAPO = {"temperature_positive": 1.0, "temperature_negative": 1.05}
POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo": PolicyLoss(ppo, _MEAN_OF_MEANS, _PPO),
    "clipped": PolicyLoss(ppo, _MEAN_OF_MEANS, _PPO),
    "dapo": PolicyLoss(ppo, _TOKEN_MEAN, {**_PPO, "clip_high": 0.28}),
    "dr_grpo": PolicyLoss(ppo, "seq-mean-token-sum-norm", _PPO),
    "gspo": PolicyLoss(gspo, _MEAN_OF_MEANS, _GSPO, shares_rows=True),
    "gspo-token": PolicyLoss(gspo_token, _MEAN_OF_MEANS, _GSPO),
    "gmpo": PolicyLoss(gmpo, _MEAN_OF_MEANS, {"max_log_ratio": 0.4}, shares_rows=True),
    "cpgd": PolicyLoss(
        cpgd,
        _MEAN_OF_MEANS,
        {"clip_low": 0.2, "clip_high": 0.2, "drift_coef": 0.001, "drift_cap": 2.0},
    ),
    "cispo": PolicyLoss(cispo, _TOKEN_MEAN, {"clip_low": 1.0, "clip_high": 0.28}),
    "sapo": PolicyLoss(sapo, _MEAN_OF_MEANS, _SAPO),
    "clip_cov": PolicyLoss(
        clip_cov,
        _TOKEN_MEAN,
        {"clip_low": 1.0, "clip_high": 1.0, "cov_ratio": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    ),
    "kl_cov": PolicyLoss(kl_cov, _TOKEN_MEAN, {"cov_ratio": 2e-3, "kl_coef": 1.0}),
    "reinforce": PolicyLoss(reinforce, _TOKEN_MEAN, {}),
    "dro": PolicyLoss(dro, _TOKEN_MEAN, {"penalty": 0.1}),
    "ppo-sequence": PolicyLoss(
        ppo_sequence, _MEAN_OF_MEANS, {"clip_low": 0.2, "clip_high": 0.2}, shares_rows=True
    ),
    "sapo-sequence": PolicyLoss(sapo_sequence, _MEAN_OF_MEANS, _SAPO, shares_rows=True),
}


def kl_term(name: str, p: Pair, reference: Pair, q: Pair, mask: Flags, borders: Borders) -> Term:
    """Estimate of KL(policy || reference) per token.

    Source: Schulman, "Approximating KL divergence"; k3_is: DeepSeek-V3.2, arXiv:2512.02556; those
    with + have the value of their name, and the gradient of the divergence itself.
    """
    d = p.less(reference, mask)
    if name == "k1":
        return Term(d.own, np.ones_like(d.own)).inside(mask)
    if name == "abs":
        return Term(np.abs(d.own), _sign(d, borders)).inside(mask)
    if name == "k2":
        return Term(d.own**2 / 2, d.own).inside(mask)
    held, is_free = _held(d)
    value, slope = _k3(held.own), np.where(is_free, 1 - np.exp(-held.own), 0.0)
    kind = name.removesuffix("+").removesuffix("_is")
    if kind != name:
        # From its definition: the value of its name, the gradient of the divergence itself.
        weight = 1.0 if name.endswith("+") else _ratio(p.less(q, mask))[0].own
        bounded = {"k1": d.own, "k2": d.own**2 / 2, "k3": np.minimum(value, MAX_K3)}[kind]
        # That of rho d by both factors.
        slope = d.own + 1 if name == "k1_is" else d.own
        return Term(weight * bounded, weight * slope).inside(mask)
    if name == "k3":
        is_bounded = borders.above(held.map(_k3), MAX_K3)
        slope = np.where(is_bounded, 0.0, slope)
        value = np.where(is_bounded, MAX_K3, value)
    return Term(value, slope).inside(mask)


def _k3(d: Array) -> Array:
    return np.asarray(np.expm1(-d) + d)


def value_term(
    values: Pair, old: Pair, returns: Array, mask: Flags, *, clip: float, borders: Borders
) -> Term:
    """Half the squared error, the larger one of the free and the clipped value; clip 0 is off."""
    error = values.own - returns
    if clip <= 0:
        return Term(error**2 / 2, error).inside(mask)
    change = values.less(old, mask)
    is_up, is_down = borders.above(change, clip), ~borders.at_least(change, -clip)
    held = old.own + np.select([is_up, is_down], [clip, -clip], change.own)
    free_error, held_error = error**2, (held - returns) ** 2
    uses_held = (is_up | is_down) & (held_error > free_error)
    return Term(
        np.where(uses_held, held_error, free_error) / 2, np.where(uses_held, 0.0, error)
    ).inside(mask)


def token_shares(mask: Flags, mode: str) -> Array:
    """u_i of every token: [rows, seq]."""
    lengths = row_lengths(mask)
    return np.where(mask, 1.0 / lengths if mode == "seq-mean-token-mean" else 1.0, 0.0)


def normalizer(mask: Flags, mode: str, budget: int) -> float:
    """Z: tokens, rows with tokens, or those times the response budget of the run."""
    if mode == "token-mean":
        return float(mask.sum())
    num_rows = float(mask.any(axis=1).sum())
    return num_rows * budget if mode == "seq-mean-token-sum-norm" else num_rows

"""Policy losses, KL terms and the value loss: values and derivatives, written out by hand.

p are log-probabilities under the trained policy, q under that of the start of the step.

Sources: formulas and papers as in the docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lightrft.tools.audit.corrections import HELD, Borders, Pair
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
        return Pair(
            np.where(self.mask, self.p.own - self.q.own, 0.0),
            np.where(self.mask, self.p.run - self.q.run, 0.0),
        )

    @property
    def lengths(self) -> Array:
        """[rows, 1] tokens of each row, at least 1."""
        return np.asarray(np.maximum(self.mask.sum(axis=1, keepdims=True), 1), dtype=np.float64)


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

    def inside(self, mask: Flags) -> Term:
        """0 outside the mask."""
        return Term(np.where(mask, self.value, 0.0), np.where(mask, self.slope, 0.0))


Loss = Callable[[Batch, Mapping[str, float | None]], Term]


def _held(value: Pair) -> tuple[Pair, Flags]:
    """Within +-20, and where that does not act."""
    return Pair(np.clip(value.own, -HELD, HELD), np.clip(value.run, -HELD, HELD)), (
        np.abs(value.own) <= HELD
    )


def _exp(value: Pair) -> Pair:
    return Pair(np.exp(value.own), np.exp(value.run))


def _spread(row: Array, like: Array) -> Array:
    return np.asarray(np.broadcast_to(row, like.shape))


def _surrogate(ratio: Pair, advantages: Array, batch: Batch, low: float, high: float) -> Term:
    """-min(r A, clip(r) A) and its derivative by ln r."""
    is_high = (advantages > 0) & batch.borders.above(ratio, 1 + high)
    is_low = (advantages < 0) & ~batch.borders.at_least(ratio, 1 - low)
    value = -ratio.own * advantages
    value = np.where(is_high, -(1 + high) * advantages, value)
    value = np.where(is_low, -(1 - low) * advantages, value)
    return Term(value, np.where(is_high | is_low, 0.0, -ratio.own * advantages))


def ppo(batch: Batch, given: Mapping[str, float | None]) -> Term:
    """Schulman et al. 2017, arXiv:1707.06347, eq. 7; Ye et al. 2019, arXiv:1912.09729."""
    delta, is_free = _held(batch.difference)
    ratio, advantages = _exp(delta), batch.advantages
    found = _surrogate(ratio, advantages, batch, _at(given, "clip_low"), _at(given, "clip_high"))
    slope = np.where(is_free, found.slope, 0.0)
    cap = given.get("dual_clip")
    if cap is None:
        return Term(found.value, slope)
    is_capped = (advantages < 0) & batch.borders.above(ratio, cap)
    return Term(
        np.where(is_capped, -cap * advantages, found.value), np.where(is_capped, 0.0, slope)
    )


def gspo(batch: Batch, given: Mapping[str, float | None]) -> Term:
    """Zheng et al. 2025, arXiv:2507.18071, eq. 5: one ratio a row."""
    found = gspo_token(batch, given)
    # Each of the row's L values depends on the mean, and the mean on each token by 1 / L.
    shared = (batch.weights * found.slope).sum(axis=1, keepdims=True) / batch.lengths
    return Term(found.value, _spread(shared, found.slope))


def gspo_token(batch: Batch, given: Mapping[str, float | None]) -> Term:
    """The same, sec. 4.3: the gradient of a token is that of its own advantage."""
    mean, is_free = _row_mean(batch, batch.difference)
    found = _surrogate(
        _exp(mean), batch.advantages, batch, _at(given, "clip_low"), _at(given, "clip_high")
    )
    return Term(found.value, np.where(is_free & batch.mask, found.slope, 0.0))


def _row_mean(batch: Batch, values: Pair) -> tuple[Pair, Flags]:
    own, run = (
        _spread(x.sum(axis=1, keepdims=True) / batch.lengths, x) for x in (values.own, values.run)
    )
    return _held(Pair(own, run))


def gmpo(batch: Batch, given: Mapping[str, float | None]) -> Term:
    """Zhao et al. 2025, arXiv:2507.20673: geometric mean of bounded ratios."""
    bound, advantages, d = _at(given, "max_log_ratio"), batch.advantages, batch.difference
    is_held = ((advantages > 0) & batch.borders.above(d, bound)) | (
        (advantages < 0) & ~batch.borders.at_least(d, -bound)
    )
    limit = np.where(advantages > 0, bound, -bound)
    bounded = Pair(np.where(is_held, limit, d.own), np.where(is_held, limit, d.run))
    mean, is_free = _row_mean(batch, bounded)
    ratio = np.exp(mean.own)
    loss = np.where(batch.mask, -ratio * advantages, 0.0)
    shared = _spread((batch.weights * loss).sum(axis=1, keepdims=True) / batch.lengths, loss)
    return Term(loss, np.where(is_held | ~is_free, 0.0, shared))


def cpgd(batch: Batch, given: Mapping[str, float | None]) -> Term:
    """Liu et al. 2025, arXiv:2505.12504: clipped log-ratio, and a drift term."""
    advantages, d = batch.advantages, batch.difference
    high, low = np.log(1 + _at(given, "clip_high")), np.log(1 - _at(given, "clip_low"))
    is_high = (advantages > 0) & batch.borders.above(d, high)
    # An advantage of 0 has no loss, whatever its side.
    is_low = (advantages <= 0) & ~batch.borders.at_least(d, low)
    bounded = np.where(is_high, high, np.where(is_low, low, d.own))
    coef, cap = _at(given, "drift_coef"), _at(given, "drift_cap")
    drift = coef * np.minimum(np.exp(np.clip(d.own, -HELD, HELD)) - 1, cap)
    value = -(batch.q.own + bounded) * advantages + drift * batch.p.own
    return Term(value, np.where(is_high | is_low, 0.0, -advantages) + drift)


def cispo(batch: Batch, given: Mapping[str, float | None]) -> Term:
    """MiniMax-M1 2025, arXiv:2506.13585, eqs. 4 and 5."""
    ratio = np.exp(np.clip(batch.difference.own, -HELD, HELD))
    weight = np.clip(ratio, 1 - _at(given, "clip_low"), 1 + _at(given, "clip_high"))
    return Term(-weight * batch.advantages * batch.p.own, -weight * batch.advantages)


def sapo(batch: Batch, given: Mapping[str, float | None]) -> Term:
    """Gao et al. 2025, arXiv:2511.20347: a sigmoid gate."""
    advantages, (delta, is_free) = batch.advantages, _held(batch.difference)
    positive, negative = _at(given, "temperature_positive"), _at(given, "temperature_negative")
    tau, ratio = np.where(advantages > 0, positive, negative), np.exp(delta.own)
    with np.errstate(over="ignore"):
        gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    slope = np.where(is_free, -4 * gate * (1 - gate) * ratio * advantages, 0.0)
    return Term(-4 / tau * gate * advantages, slope)


def reinforce(batch: Batch, _: Mapping[str, float | None]) -> Term:
    """Williams 1992."""
    return Term(-batch.advantages * batch.p.own, -batch.advantages)


def clip_cov(batch: Batch, given: Mapping[str, float | None]) -> Term:
    """Cui et al. 2025, arXiv:2505.22617, with a systematic draw of the tokens left out."""
    bounds = {"clip_low": given["clip_low"], "clip_high": given["clip_high"], "dual_clip": None}
    found = ppo(batch, bounds)
    covariance, borders = _covariance(batch), batch.borders
    ratio = _exp(_held(batch.difference)[0])
    is_clipped = (batch.advantages > 0) & borders.above(ratio, 1 + _at(given, "clip_high"))
    is_clipped |= (batch.advantages < 0) & ~borders.at_least(ratio, 1 - _at(given, "clip_low"))
    is_candidate = batch.mask & ~is_clipped & borders.above(covariance, _at(given, "cov_low"))
    is_candidate &= ~borders.at_least(covariance, _at(given, "cov_high"))
    candidates = np.flatnonzero(is_candidate)
    count = min(_share(batch, _at(given, "cov_ratio")), len(candidates))
    left_out = np.zeros(batch.mask.size, dtype=np.bool_)
    for k in range(count):
        left_out[candidates[int((2 * k + 1) * len(candidates) // (2 * count))]] = True
    kept = ~left_out.reshape(batch.mask.shape)
    return Term(np.where(kept, found.value, 0.0), np.where(kept, found.slope, 0.0))


def kl_cov(batch: Batch, given: Mapping[str, float | None]) -> Term:
    """The same paper: |p - q| on the tokens of highest covariance."""
    delta, is_free = _held(batch.difference)
    own, covariance = np.exp(delta.own) * batch.advantages, _covariance(batch)
    count = _share(batch, _at(given, "cov_ratio"))
    inside = np.flatnonzero(batch.mask)
    by_run, by_own = (
        inside[np.argsort(-values.ravel()[inside], kind="stable")][:count]
        for values in (covariance.run, covariance.own)
    )
    # The run's choice counts where it differs from the own one by rounding only.
    limit = covariance.own.ravel()[by_own].min() if count else 0.0
    is_plausible = covariance.own.ravel()[by_run] >= limit - batch.borders.tolerance
    is_held = np.zeros(batch.mask.size, dtype=np.bool_)
    is_held[by_run if is_plausible.all() else by_own] = True
    coef = _at(given, "kl_coef") * is_held.reshape(batch.mask.shape)
    slope = np.where(is_free, -own, 0.0) + coef * _sign(batch.difference, batch.borders)
    return Term(-own + coef * np.abs(batch.difference.own), slope)


def _covariance(batch: Batch) -> Pair:
    def of(p: Array) -> Array:
        count = max(int(batch.mask.sum()), 1)
        a, b = np.where(batch.mask, p, 0.0), np.where(batch.mask, batch.advantages, 0.0)
        product = (a - a.sum() / count) * (b - b.sum() / count)
        return np.where(batch.mask, product, 0.0)

    return Pair(of(batch.p.own), of(batch.p.run))


def _share(batch: Batch, ratio: float) -> int:
    count = int(batch.mask.sum())
    return 0 if ratio == 0 else min(max(1, int(ratio * count + 1e-9)), count)


def _sign(value: Pair, borders: Borders) -> Array:
    return 1.0 * borders.above(value, 0.0) - 1.0 * ~borders.at_least(value, 0.0)


def _at(given: Mapping[str, float | None], name: str) -> float:
    value = given[name]
    if value is None:
        raise ValueError(f"the loss needs a number for {name}")
    return float(value)


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
    defaults: Mapping[str, float | None]
    shares_rows: bool = False

    def term(self, batch: Batch, given: Mapping[str, float | None]) -> Term:
        """The weighted values, and the derivative of their sum by each log-probability."""
        found = self.function(batch, given).inside(batch.mask)
        slope = found.slope if self.shares_rows else found.slope * batch.weights
        return Term(found.value * batch.weights, slope)


_MEAN_OF_MEANS, _TOKEN_MEAN = "seq-mean-token-mean", "token-mean"
_PPO = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
_GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
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
        {
            "clip_low": 0.2,
            "clip_high": 0.2,
            "drift_coef": 0.001,
            "drift_cap": 2.0,
        },
    ),
    "cispo": PolicyLoss(cispo, _TOKEN_MEAN, {"clip_low": 1.0, "clip_high": 0.28}),
    "sapo": PolicyLoss(
        sapo,
        _MEAN_OF_MEANS,
        {
            "temperature_positive": 1.0,
            "temperature_negative": 1.05,
        },
    ),
    "clip_cov": PolicyLoss(
        clip_cov,
        _TOKEN_MEAN,
        {
            "clip_low": 1.0,
            "clip_high": 1.0,
            "cov_ratio": 2e-4,
            "cov_low": 1.0,
            "cov_high": 5.0,
        },
    ),
    "kl_cov": PolicyLoss(kl_cov, _TOKEN_MEAN, {"cov_ratio": 2e-3, "kl_coef": 1.0}),
    "reinforce": PolicyLoss(reinforce, _TOKEN_MEAN, {}),
}


def kl_term(name: str, p: Pair, reference: Pair, q: Pair, mask: Flags, borders: Borders) -> Term:
    """Estimate of KL(policy || reference) per token.

    Source: Schulman, "Approximating KL divergence"; k3_is: DeepSeek-V3.2, arXiv:2512.02556.
    """
    d = Pair(np.where(mask, p.own - reference.own, 0.0), np.where(mask, p.run - reference.run, 0.0))
    if name == "k1":
        return Term(d.own, np.ones_like(d.own)).inside(mask)
    if name == "abs":
        return Term(np.abs(d.own), _sign(d, borders)).inside(mask)
    if name == "k2":
        return Term(d.own**2 / 2, d.own).inside(mask)
    held, is_free = _held(d)
    value, slope = _k3(held.own), np.where(is_free, 1 - np.exp(-held.own), 0.0)
    if name == "k3_is":
        # From its definition: the value of k3, the gradient of the divergence itself.
        ratio = np.exp(np.clip(np.where(mask, p.own - q.own, 0.0), -HELD, HELD))
        return Term(ratio * np.minimum(value, MAX_K3), ratio * d.own).inside(mask)
    if name == "k3":
        is_bounded = borders.above(Pair(value, _k3(held.run)), MAX_K3)
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
    change = Pair(values.own - old.own, values.run - old.run)
    is_up, is_down = borders.above(change, clip), ~borders.at_least(change, -clip)
    held = old.own + np.where(is_up, clip, np.where(is_down, -clip, change.own))
    free_error, held_error = error**2, (held - returns) ** 2
    uses_held = (is_up | is_down) & (held_error > free_error)
    return Term(
        np.where(uses_held, held_error, free_error) / 2, np.where(uses_held, 0.0, error)
    ).inside(mask)


def token_shares(mask: Flags, mode: str) -> Array:
    """u_i of every token: [rows, seq]."""
    lengths = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    return np.where(mask, 1.0 / lengths if mode == "seq-mean-token-mean" else 1.0, 0.0)


def normalizer(mask: Flags, mode: str, budget: int) -> float:
    """Z: tokens, rows with tokens, or those times the response budget of the run."""
    if mode == "token-mean":
        return float(mask.sum())
    num_rows = float(mask.any(axis=1).sum())
    return num_rows * budget if mode == "seq-mean-token-sum-norm" else num_rows

"""Weights of tokens: off-policy corrections, and the tokens of high entropy.

Sources: decoupled PPO, arXiv:2110.00641; IcePop, arXiv:2510.18855; DeepSeek-V3.2, arXiv:2512.02556;
high-entropy tokens, arXiv:2506.01939.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightrft.config import TrainConfig
from lightrft.tools.audit.record import Array, Flags

PRESETS = {
    "tis": "weight:ratio:token:high=2",
    "icepop": "weight:ratio:token reject:ratio:token:low=0.5:high=5",
    "tis-sequence": "weight:ratio:sequence:high=2",
    "mis": "weight:ratio:sequence reject:ratio:sequence:high=3",
    "tis-geometric": "weight:ratio:geometric:high=2",
    "geometric": "weight:ratio:token reject:ratio:geometric:low=0.999:high=1.002",
    "geometric-tis": "weight:ratio:token:high=2 reject:ratio:geometric:low=0.999:high=1.002",
    "geometric-mis": "weight:ratio:geometric reject:ratio:geometric:low=0.999:high=1.002",
    "token-veto": "veto:ratio:token:low=0.0001",
    "off-policy-mask": "reject:k1:geometric:high=0.5:negative:new/engine",
    "dppo": (
        "reject:difference:token:high=0.2:positive:new/engine "
        "reject:difference:token:low=-0.2:negative:new/engine"
    ),
}
SIGNS = ("negative", "positive", "towards")
HELD = 20.0  # of a logarithm that is exponentiated


@dataclass(frozen=True, slots=True)
class Pair:
    """One quantity twice: as recomputed, and as the run had it."""

    own: Array
    run: Array

    def map(self, change: Callable[[Array], Array]) -> Pair:
        """Both, changed alike."""
        return Pair(change(self.own), change(self.run))

    def at(self, places: Flags | list[int] | tuple[np.intp, NDArray[np.intp]]) -> Pair:
        """Some entries of both, by any index of NumPy."""
        return Pair(self.own[places], self.run[places])

    def less(self, other: Pair, mask: Flags) -> Pair:
        """The difference inside the mask, 0 outside."""
        return Pair(
            np.where(mask, self.own - other.own, 0.0), np.where(mask, self.run - other.run, 0.0)
        )


@dataclass(slots=True)
class Borders:
    """Decisions at a bound: the run's is taken where both values are equal up to rounding.

    A value within rounding of a bound may fall on either side of it, and neither is wrong.

    Args:
        tolerance: Relative to 1, or to the value if larger, up to which two values are equal.
        num_taken: How often the run's side was taken although the own one differed.
    """

    tolerance: float
    num_taken: int = 0

    def above(self, value: Pair, bound: Array | float) -> Flags:
        """Whether the value exceeds the bound."""
        return self._decide(value, value.own > bound, value.run > bound)

    def at_least(self, value: Pair, bound: Array | float) -> Flags:
        """Whether the value reaches the bound."""
        return self._decide(value, value.own >= bound, value.run >= bound)

    def _decide(self, value: Pair, own: Flags, run: Flags) -> Flags:
        limit = self.tolerance * np.maximum(1.0, np.abs(value.own))
        is_close = np.abs(value.own - value.run) <= limit
        self.num_taken += int(((own != run) & is_close).sum())
        return np.where(is_close, run, own)

    def highest(self, values: Pair, count: int) -> NDArray[np.intp]:
        """Places of so many highest values, of equal ones the first; [] of 0."""
        by_own, by_run = (
            np.argsort(-each, kind="stable")[:count] for each in (values.own, values.run)
        )
        limit = values.own[by_own].min(initial=np.inf) - self.tolerance
        return by_run if (values.own[by_run] >= limit).all() else by_own


@dataclass(frozen=True, slots=True)
class Term:
    """One word of a correction: ACTION:STATISTIC:LEVEL and what follows."""

    action: str
    statistic: str
    level: str
    options: tuple[str, ...] = ()

    def bound(self, name: str) -> float | None:
        """The last bound called `name`, or None."""
        found = [o.partition("=")[2] for o in self.options if o.startswith(f"{name}=")]
        return float(found[-1]) if found else None

    @property
    def sides(self) -> tuple[str, str]:
        """The two policies that are compared."""
        pairs = ["old/engine", *(option for option in self.options if "/" in option)]
        first, _, second = pairs[-1].partition("/")
        return first, second


def parse(config: TrainConfig) -> tuple[Term, ...]:
    """The terms of `off_policy_correction`; () without."""
    words: list[str] = []
    for word in _text(config).split():
        name, *options = word.split(":")
        terms = PRESETS[name].split() if name in PRESETS else [word]
        for option in options if name in PRESETS else ():
            terms = _added(terms, option)
        words += terms
    bounds: dict[str, object] = {"low": config.correction_low, "high": config.correction_high}
    bounds |= dict(config.correction_args or {})
    for key, value in bounds.items():
        if value is not None:
            words = _added(words, f"{key}={value}")
    parts = [word.split(":") for word in words]
    return tuple(Term(p[0], p[1], p[2], tuple(p[3:])) for p in parts)


def _text(config: TrainConfig) -> str:
    """As given; of rows that older weights sampled it is tis, unless none is."""
    text = config.off_policy_correction
    if text is None and (config.rollout_lag or config.stream_chunk):
        text = None if config.use_rollout_logprobs else "tis"
    if text is None or text in ("none", ("none",)):
        return ""
    return text if isinstance(text, str) else " ".join(text)


def _added(terms: list[str], option: str) -> list[str]:
    """The option with the one term that it can belong to; a pair with all."""
    if "/" in option:
        return [f"{term}:{option}" for term in terms]
    weights = [term for term in terms if term.startswith("weight")]
    if option == "mean-one":
        meant = weights
    elif option in SIGNS:
        meant = [term for term in terms if term not in weights]
    else:
        meant = [term for term in terms if "=" in term] or terms
    return [f"{term}:{option}" if term is meant[0] else term for term in terms]


def follows_policy(config: TrainConfig) -> bool:
    """Whether a term looks at the policy that is updated."""
    return any("new" in term.sides for term in parse(config))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Numbers that corrections look at: pairs of [rows, seq] arrays of one optimizer batch.

    Args:
        old: Logprobs of the trainer under the distribution that was sampled from.
        rollout: Of the engine, exact.
        advantages: Of the run and recomputed.
        mask: [rows, seq] bool.
        new: Logprobs of the policy that the update differentiates; those of `old` by default.
    """

    old: Pair
    rollout: Array
    advantages: Pair
    mask: Flags
    new: Pair | None = None

    def of(self, side: str) -> Pair:
        """The logprobs of a policy by its name."""
        engine = Pair(self.rollout, self.rollout)
        return {"old": self.old, "engine": engine, "new": self.new or self.old}[side]


def row_lengths(mask: Flags) -> Array:
    """[rows, 1] tokens of each row, at least 1."""
    return np.asarray(np.maximum(mask.sum(axis=1, keepdims=True), 1.0))


def correction(terms: tuple[Term, ...], tokens: Tokens, borders: Borders) -> Array:
    """The factor of every token's loss: [rows, seq], 0 where rejected and outside the mask."""
    mask = tokens.mask
    weights, is_rejected = np.ones(mask.shape), np.zeros(mask.shape, dtype=np.bool_)
    scale = 1.0
    for term in terms:
        low, high = term.bound("low"), term.bound("high")
        value = _values(term, tokens)
        if term.action == "weight":
            weights = np.clip(value.own, low, high) if (low, high) != (None, None) else value.own
            if "mean-one" in term.options:
                inside = np.where(mask, weights, 0.0)
                each = inside[mask] if term.level == "token" else inside.max(axis=1)[mask.any(1)]
                scale = len(each) / each.sum() if each.sum() > 0 else 1.0
            continue
        is_outside = np.zeros(mask.shape, dtype=np.bool_)
        if low is not None:
            is_outside |= ~borders.at_least(value, low)
        if high is not None:
            is_outside |= borders.above(value, high)
        is_outside &= mask & _has_sign(term, tokens, borders)
        if term.action == "veto" or term.level == "worst":
            is_outside = mask & is_outside.any(axis=1, keepdims=True)
        is_rejected |= is_outside
    return np.where(mask & ~is_rejected, weights, 0.0) * scale


def _values(term: Term, tokens: Tokens) -> Pair:
    first, second = (tokens.of(side) for side in term.sides)
    return Pair(
        _value(term, first.own, second.own, tokens.mask),
        _value(term, first.run, second.run, tokens.mask),
    )


def _value(term: Term, first: Array, second: Array, mask: Flags) -> Array:
    ratio = np.where(mask, first - second, 0.0)
    if term.statistic == "ratio":
        return np.asarray(np.exp(np.clip(_at_level(term.level, ratio, mask), -HELD, HELD)))
    p, q = (np.where(mask, np.exp(each), 0.5) for each in (first, second))
    held = np.clip(ratio, -HELD, HELD)
    values = {
        "distance": np.abs(np.exp(held) - 1),
        "k1": -ratio,
        "k2": ratio**2 / 2,
        "k3": np.expm1(held) - held,
        "reverse_k3": np.expm1(-held) + held,
        "difference": p - q,
        "variation": np.abs(p - q),
        "binary_kl": -q * ratio + _rest(q, q) - _rest(q, p),
    }[term.statistic]
    return _at_level(term.level, values, mask)


def _rest(q: Array, p: Array) -> Array:
    """(1 - q) ln(1 - p), 0 for q = 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(q < 1, (1 - q) * np.log1p(-np.minimum(p, 1)), 0.0)


def _at_level(level: str, values: Array, mask: Flags) -> Array:
    if level in ("token", "worst"):
        return values
    if level == "largest":
        largest = np.where(mask, values, -np.inf).max(axis=1, keepdims=True)
        return np.asarray(np.broadcast_to(largest, values.shape))
    total = values.sum(axis=1, keepdims=True)
    if level == "geometric":
        total = total / row_lengths(mask)
    return np.asarray(np.broadcast_to(total, values.shape))


def _has_sign(term: Term, tokens: Tokens, borders: Borders) -> Flags:
    advantages, mask = tokens.advantages, tokens.mask
    if not set(SIGNS) & set(term.options):
        return np.ones(mask.shape, dtype=np.bool_)
    if "towards" in term.options:
        first, second = (tokens.of(side) for side in term.sides)
        moved = first.less(second, mask)
        gain = Pair(moved.own * advantages.own, moved.run * advantages.run)
        return borders.above(gain, 0.0)
    if term.level in ("sequence", "geometric", "largest"):
        advantages = advantages.map(lambda each: _at_level("geometric", each, mask))
    if "negative" in term.options:
        advantages = advantages.map(np.negative)
    return borders.above(advantages, 0.0)


def high_entropy(entropy: Pair, mask: Flags, borders: Borders, config: TrainConfig) -> Flags:
    """Tokens whose entropy is among the highest of the batch or of their row: [rows, seq]."""
    ratio = config.high_entropy_token_ratio
    if config.high_entropy_scope == "batch":
        above = entropy.map(lambda each: each - _quantile(each[mask], 1 - ratio))
        return mask & borders.at_least(above, 0.0)
    kept = np.zeros(mask.shape, dtype=np.bool_)
    for row in np.flatnonzero(mask.any(axis=1)):
        places = np.flatnonzero(mask[row])
        count = max(1, math.floor(len(places) * ratio + 1e-9))
        kept[row, places[borders.highest(entropy.at((row, places)), count)]] = True
    return kept


def _quantile(values: Array, share: float) -> float:
    return float(np.quantile(values, share)) if values.size else 0.0

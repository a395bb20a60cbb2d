"""Weights of tokens: off-policy corrections, and the tokens of high entropy.

Sources: decoupled PPO, arXiv:2110.00641; IcePop, arXiv:2510.18855; DeepSeek-V3.2, arXiv:2512.02556;
high-entropy tokens, arXiv:2506.01939.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

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
    "off-policy-mask": "reject:k1:geometric:high=0.5:negative",
    "dppo": "reject:difference:token:high=0.2:positive reject:difference:token:low=-0.2:negative",
}
HELD = 20.0  # of a logarithm that is exponentiated


@dataclass(frozen=True, slots=True)
class Pair:
    """One quantity twice: as recomputed, and as the run had it."""

    own: Array
    run: Array


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


def parse(config: TrainConfig) -> tuple[Term, ...]:
    """The terms of `off_policy_correction`; () without."""
    text = config.off_policy_correction
    if not text:
        return ()
    words: list[str] = []
    for word in (text if isinstance(text, str) else " ".join(text)).split():
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


def _added(terms: list[str], option: str) -> list[str]:
    """The option with the one term that it can belong to."""
    weights = [term for term in terms if term.startswith("weight")]
    if option == "mean-one":
        meant = weights
    elif option in ("negative", "positive"):
        meant = [term for term in terms if term not in weights]
    else:
        meant = [term for term in terms if "=" in term] or terms
    return [f"{term}:{option}" if term is meant[0] else term for term in terms]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What corrections look at: pairs of [rows, seq] arrays of one optimizer batch.

    Args:
        old: Logprobs of the trainer under the distribution that was sampled from.
        rollout: Of the engine, exact.
        advantages: Of the run and recomputed.
        mask: [rows, seq] bool.
    """

    old: Pair
    rollout: Array
    advantages: Pair
    mask: Flags
    lengths: Array = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", np.maximum(self.mask.sum(axis=1, keepdims=True), 1))


def correction(terms: tuple[Term, ...], tokens: Tokens, borders: Borders) -> Array:
    """The factor of every token's loss: [rows, seq], 0 where rejected and outside the mask."""
    mask = tokens.mask
    weights, is_rejected = np.ones(mask.shape), np.zeros(mask.shape, dtype=np.bool_)
    scale = 1.0
    for term in terms:
        low, high = term.bound("low"), term.bound("high")
        value = _pair(term, tokens)
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


def _pair(term: Term, tokens: Tokens) -> Pair:
    return Pair(_value(term, tokens, tokens.old.own), _value(term, tokens, tokens.old.run))


def _value(term: Term, tokens: Tokens, old: Array) -> Array:
    mask = tokens.mask
    ratio = np.where(mask, old - tokens.rollout, 0.0)
    if term.statistic == "ratio":
        return np.asarray(np.exp(np.clip(_at_level(term, ratio, tokens), -HELD, HELD)))
    probability = np.where(mask, np.exp(old) - np.exp(tokens.rollout), 0.0)
    held = np.clip(ratio, -HELD, HELD)
    values = {
        "k1": -ratio,
        "k2": ratio**2 / 2,
        "k3": np.expm1(held) - held,
        "difference": probability,
        "variation": np.abs(probability),
    }[term.statistic]
    return _at_level(term, values, tokens)


def _at_level(term: Term, values: Array, tokens: Tokens) -> Array:
    if term.level in ("token", "worst"):
        return values
    total = values.sum(axis=1, keepdims=True)
    if term.level == "geometric":
        total = total / tokens.lengths
    return np.asarray(np.broadcast_to(total, values.shape))


def _has_sign(term: Term, tokens: Tokens, borders: Borders) -> Flags:
    if not {"negative", "positive"} & set(term.options):
        return np.ones(tokens.mask.shape, dtype=np.bool_)
    pair = tokens.advantages
    if term.level in ("sequence", "geometric"):
        own, run = (x.sum(axis=1, keepdims=True) / tokens.lengths for x in (pair.own, pair.run))
        shape = tokens.mask.shape
        pair = Pair(np.broadcast_to(own, shape), np.broadcast_to(run, shape))
    if "negative" in term.options:
        return borders.above(Pair(-pair.own, -pair.run), 0.0)
    return borders.above(pair, 0.0)


def high_entropy(entropy: Pair, mask: Flags, borders: Borders, config: TrainConfig) -> Flags:
    """Tokens whose entropy is among the highest of the batch or of their row: [rows, seq]."""
    ratio = config.high_entropy_token_ratio
    if config.high_entropy_scope == "batch":
        own, run = (_quantile(each[mask], 1 - ratio) for each in (entropy.own, entropy.run))
        distance = Pair(entropy.own - own, entropy.run - run)
        return mask & borders.at_least(distance, 0.0)
    kept = np.zeros(mask.shape, dtype=np.bool_)
    for row in np.flatnonzero(mask.any(axis=1)):
        places = np.flatnonzero(mask[row])
        count = max(1, math.floor(len(places) * ratio + 1e-9))
        own, run = entropy.own[row, places], entropy.run[row, places]
        # The last that is kept, by each; ties go to the earlier token.
        order = places[np.argsort(-run, kind="stable")][:count]
        limit = np.sort(own)[::-1][count - 1]
        is_plausible = own[np.isin(places, order)] >= limit - borders.tolerance
        best = places[np.argsort(-own, kind="stable")][:count]
        kept[row, order if is_plausible.all() else best] = True
    return kept


def _quantile(values: Array, share: float) -> float:
    return float(np.quantile(values, share)) if values.size else 0.0


def options_of(given: Mapping[str, object] | None) -> dict[str, object]:
    """Hyper-parameters as a dictionary."""
    return dict(given or {})

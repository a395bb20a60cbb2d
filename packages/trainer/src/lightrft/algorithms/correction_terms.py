"""Off-policy corrections as text: presets, or terms ACTION:STATISTIC:LEVEL[:BOUND...].

    weight:ratio:token:high=2             multiply the loss by the ratio, held within the bounds
    reject:k3:sequence:high=0.01          weight 0 where the statistic lies outside the bounds
    veto:ratio:token:low=1e-4             the same for the whole row of such a token
    tis:high=3                            a preset with other bounds
    reject:k3:sequence:high=0.01 tis      several at once; at most one of them a weight

Statistics of a token, with l = old_logprob - rollout_logprob:

    ratio         exp(l)
    k1, k2, k3    -l, l^2 / 2, exp(l) - 1 - l: estimates of KL(engine || trainer)
    difference    |exp(old_logprob) - exp(rollout_logprob)|

Levels: `token`; `sequence`, the product of the ratios or the sum of another statistic over the
row; `geometric`, the geometric mean of the ratios or the mean of another statistic; `worst`, the
row lies outside if one of its tokens does. Further words: `negative` tests only where the
advantage (of a row its mean) is below 0; `mean-one` divides the weights by their mean over the
batch.

`corrections.correction_weights` computes what is described here. This module needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightrft.algorithms.lookup import lookup

if TYPE_CHECKING:
    from collections.abc import Sequence

ACTIONS = ("weight", "reject", "veto")
STATISTICS = ("ratio", "k1", "k2", "k3", "difference")
LEVELS = ("token", "sequence", "geometric", "worst")

CORRECTION_PRESETS: dict[str, str] = {
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
}
"""Terms by name.

`icepop` is arXiv:2510.18855; `off-policy-mask` is DeepSeek-V3.2, arXiv:2512.02556, with the bound
that TRL suggests; the others are the common forms of TRL, verl, slime, OpenRLHF and NeMo-RL.
"""


@dataclass(frozen=True, slots=True)
class CorrectionTerm:
    """One part of a correction; see the module for the words.

    Args:
        action, statistic, level: One of `ACTIONS`, `STATISTICS`, `LEVELS`.
        low, high: Bounds, inclusive; None is none.
        negative: Test only where the advantage is negative.
        mean_one: Divide the weights by their mean over the batch.

    Raises:
        ValueError: an unknown word, or parts that do not go together.
    """

    action: str
    statistic: str
    level: str
    low: float | None = None
    high: float | None = None
    negative: bool = False
    mean_one: bool = False

    def __post_init__(self) -> None:
        lookup(dict.fromkeys(ACTIONS), self.action, kind="action of a correction")
        lookup(dict.fromkeys(STATISTICS), self.statistic, kind="statistic of a correction")
        lookup(dict.fromkeys(LEVELS), self.level, kind="level of a correction")
        name = f"{self.action}:{self.statistic}:{self.level}"
        if self.action == "weight":
            if self.statistic != "ratio" or self.level == "worst" or self.negative:
                raise ValueError(
                    f"correction {name}: a weight is the ratio of a token, a sequence or the "
                    "geometric mean, for all advantages"
                )
        elif self.mean_one or not self.is_bounded:
            raise ValueError(
                f"correction {name} needs low=, high= or both, and has no mean-one: it tests, and "
                "does not weigh"
            )
        self._check_bounds(name)

    @property
    def is_bounded(self) -> bool:
        """It has a bound."""
        return self.low is not None or self.high is not None

    def _check_bounds(self, name: str) -> None:
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        lowest = -math.inf if self.statistic == "k1" else 0.0
        is_finite = all(math.isfinite(each) for each in (self.low or 0.0, self.high or 0.0))
        if not is_finite or not low < high or (self.low is not None and low < lowest):
            sign = "" if self.statistic == "k1" else "0 <= "
            raise ValueError(
                f"correction {name} needs finite bounds with {sign}low < high: got low={self.low} "
                f"and high={self.high}"
            )


def parse_correction(
    texts: str | Sequence[str], *, low: float | None = None, high: float | None = None
) -> tuple[CorrectionTerm, ...]:
    """The terms of a correction.

    Args:
        texts: Presets and terms, in one string with spaces or in several.
        low, high: Bounds that replace those of the single bounded term; None leaves them.

    Raises:
        ValueError: something is unknown or malformed, there are several weights, or `low` and
            `high` could mean several terms.
    """
    words = (texts if isinstance(texts, str) else " ".join(texts)).split()
    if not words:
        raise ValueError(f"expected an off-policy correction such as {_examples()}: got none")
    terms = tuple(term for word in words for term in _parse_word(word))
    if sum(term.action == "weight" for term in terms) > 1:
        raise ValueError(
            f"off-policy correction {' '.join(words)!r} has several weights, of which only one can "
            "multiply the loss: keep one, and write the others as reject:... or veto:..."
        )
    return _with_bounds(terms, low, high, text=" ".join(words))


def _parse_word(word: str) -> tuple[CorrectionTerm, ...]:
    head, *rest = word.split(":")
    is_preset = head in CORRECTION_PRESETS
    if not is_preset:
        if head not in ACTIONS:
            known = {**CORRECTION_PRESETS, **dict.fromkeys(ACTIONS)}
            lookup(known, head, kind="off-policy correction")
        if len(rest) < 2:
            raise ValueError(
                f"correction {word!r} is incomplete: expected ACTION:STATISTIC:LEVEL and bounds, "
                f"such as {_examples()}"
            )
        head, rest = ":".join([head, *rest[:2]]), rest[2:]
    bounds: dict[str, float] = {}
    flags = {"negative": False, "mean-one": False}
    for part in rest:
        key, is_bound, value = part.partition("=")
        if is_bound and key in ("low", "high"):
            bounds[key] = _number(value, word)
        elif part in flags:
            flags[part] = True
        else:
            known = dict.fromkeys(["low=", "high=", *flags])
            lookup(known, f"{key}=" if is_bound else part, kind=f"part of correction {word!r}")
    if not is_preset:
        action, statistic, level = head.split(":")
        return (
            CorrectionTerm(
                action, statistic, level, bounds.get("low"), bounds.get("high"),
                flags["negative"], flags["mean-one"],
            ),
        )  # fmt: skip
    terms = parse_correction(CORRECTION_PRESETS[head])
    terms = _with_bounds(terms, bounds.get("low"), bounds.get("high"), text=word)
    return tuple(
        replace(
            term,
            negative=term.negative or (flags["negative"] and term.action != "weight"),
            mean_one=term.mean_one or (flags["mean-one"] and term.action == "weight"),
        )
        for term in terms
    )


def _with_bounds(
    terms: tuple[CorrectionTerm, ...], low: float | None, high: float | None, *, text: str
) -> tuple[CorrectionTerm, ...]:
    if low is None and high is None:
        return terms
    bounded = [term for term in terms if term.is_bounded] or list(terms)
    if len(bounded) > 1:
        raise ValueError(
            f"off-policy correction {text!r} has {len(bounded)} terms with bounds: write low= and "
            "high= into the term they belong to"
        )
    return tuple(
        replace(
            term, low=term.low if low is None else low, high=term.high if high is None else high
        )
        if term is bounded[0]
        else term
        for term in terms
    )


def _number(text: str, word: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"correction {word!r}: {text!r} is not a number") from error


def _examples() -> str:
    return "tis or reject:k3:sequence:high=0.01"

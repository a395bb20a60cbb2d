"""Off-policy corrections as text: presets, or terms ACTION:STATISTIC:LEVEL[:BOUND...].

    weight:ratio:token:high=2             multiply the loss by the ratio, held within the bounds
    reject:k3:sequence:high=0.01          weight 0 where the statistic lies outside the bounds
    veto:ratio:token:low=1e-4             the same for the whole row of such a token
    tis:high=3                            a preset with other bounds
    reject:k3:sequence:high=0.01 tis      several at once; at most one of them a weight

Pairs of policies that are compared: `old/engine`, the trainer before the update and the engine;
`new/engine` and `new/old`, the policy of this very forward pass and one of the two. A pair without
`new` is computed once, before the first optimizer step of a rollout; one with it in every micro
batch, from detached log-probabilities. A term without a pair compares old/engine.

Statistics of a token, with p and q its probabilities under the first and second of the pair, and
l = ln p - ln q:

    ratio         exp(l)
    distance      |exp(l) - 1|: its mean over tokens of q estimates twice the total variation
    k1, k2, k3    -l, l^2 / 2, exp(l) - 1 - l: estimates of KL(second || first)
    reverse_k3    exp(-l) - 1 + l, of KL(first || second)
    difference    p - q, signed
    variation     its size: the total variation distance of this token against all others
    binary_kl     q ln(q / p) + (1 - q) ln((1 - q) / (1 - p)): the divergence of the same

Levels: `token`; `sequence`, the product of the ratios or the sum of another statistic over the
row; `geometric`, the geometric mean of the ratios or the mean of another statistic; `largest`, the
largest one of the row's tokens; `worst`, the row lies outside if one of its tokens does. Further
words: `negative` and `positive` test only where the advantage (of a row its mean) is below or above
0; `towards` only tokens with l of the sign of their advantage, also of a row that lies outside
(`reject:distance:geometric:high=2:towards` is the filter of VACO, arXiv:2603.01365); `mean-one`
divides the weights by their mean over the batch, before rejection (verl divides by that after it).
Each test looks at all response tokens, also at those that another one rejected.

`corrections.correction_weights` computes what is described here. This module needs no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.algorithms.interface import lookup

ACTIONS = ("weight", "reject", "veto")
STATISTICS = (
    *("ratio", "distance", "k1", "k2", "k3", "reverse_k3"),
    *("difference", "variation", "binary_kl"),
)
LEVELS = ("token", "sequence", "geometric", "largest", "worst")
SIGNS = ("negative", "positive", "towards")
PAIRS = ("old/engine", "new/engine", "new/old")
OPTIONS = ("low=", "high=", *SIGNS, *PAIRS, "mean-one")
EXAMPLES = "tis or reject:k3:sequence:high=0.01"

# Terms by name.
#
# `icepop` is arXiv:2510.18855; `off-policy-mask` is DeepSeek-V3.2, arXiv:2512.02556, with the bound
# that TRL suggests; `dppo` leaves out what moved too far in the direction of its advantage, with
# the bounds of prime-rl (arXiv:2602.04879; it stands in for the clip of the loss: widen that). Both
# bound the policy that is being trained. The others are the common forms of TRL, verl, slime,
# OpenRLHF and NeMo-RL.
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
    "off-policy-mask": "reject:k1:geometric:high=0.5:negative:new/engine",
    "dppo": (
        "reject:difference:token:high=0.2:positive:new/engine "
        "reject:difference:token:low=-0.2:negative:new/engine"
    ),
}


@dataclass(frozen=True, slots=True)
class CorrectionTerm:
    """One part of a correction; see the module for the words.

    Args:
        action, statistic, level: One of `ACTIONS`, `STATISTICS`, `LEVELS`.
        low, high: Bounds, inclusive; None is none.
        sign: One of `SIGNS`: test only where the advantage has it, or the change that of the
            advantage; None tests everywhere.
        mean_one: Divide the weights by their mean over the batch.
        pair: One of `PAIRS`, the policies that are compared.

    Raises:
        ValueError: an unknown word, or parts that do not go together.
    """

    action: str
    statistic: str
    level: str
    low: float | None = None
    high: float | None = None
    sign: str | None = None
    mean_one: bool = False
    pair: str = PAIRS[0]

    def __post_init__(self) -> None:
        lookup(dict.fromkeys(ACTIONS), self.action, kind="action of a correction")
        lookup(dict.fromkeys(STATISTICS), self.statistic, kind="statistic of a correction")
        lookup(dict.fromkeys(LEVELS), self.level, kind="level of a correction")
        name = f"{self.action}:{self.statistic}:{self.level}"
        if self.action == "weight":
            if self.statistic != "ratio" or self.level == "worst" or self.sign:
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
    def sides(self) -> tuple[str, str]:
        """The two policies that are compared."""
        first, _, second = self.pair.partition("/")
        return first, second

    @property
    def follows_policy(self) -> bool:
        """It looks at the policy that is being trained, which every update changes."""
        return "new" in self.sides

    @property
    def is_token_wise(self) -> bool:
        """The weight of a token depends on no other token."""
        return self.level == "token" and self.action != "veto" and not self.mean_one

    @property
    def is_bounded(self) -> bool:
        """It has a bound."""
        return self.low is not None or self.high is not None

    def _check_bounds(self, name: str) -> None:
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        is_signed = self.statistic in ("k1", "difference")
        lowest = -math.inf if is_signed else 0.0
        is_finite = all(math.isfinite(each) for each in (self.low or 0.0, self.high or 0.0))
        if not is_finite or not low < high or (self.low is not None and low < lowest):
            raise ValueError(
                f"correction {name} needs finite bounds with {'' if is_signed else '0 <= '}low < "
                f"high: got low={self.low} and high={self.high}"
            )


def parse_correction(
    texts: str | Sequence[str], *, low: float | None = None, high: float | None = None
) -> tuple[CorrectionTerm, ...]:
    """Return the terms of a correction.

    Args:
        texts: Presets and terms, in one string with spaces or in several.
        low, high: Bounds that replace those of the single bounded term; None leaves them.

    Raises:
        ValueError: something is unknown or malformed, there are several weights, or a bound could
            belong to several terms.
    """
    text = texts if isinstance(texts, str) else " ".join(texts)
    words = [part for word in text.split() for part in _expanded(word)]
    if not words:
        raise ValueError(f"expected an off-policy correction such as {EXAMPLES}: got none")
    for key, bound in (("low", low), ("high", high)):
        if bound is not None:
            words = _with_option(words, f"{key}={bound!r}", text=text)
    terms = tuple(_term(word) for word in words)
    if sum(term.action == "weight" for term in terms) > 1:
        raise ValueError(
            f"off-policy correction {text!r} has several weights, of which only one can multiply "
            "the loss: keep one, and write the others as reject:... or veto:..."
        )
    if any(term.mean_one for term in terms) and any(term.follows_policy for term in terms):
        raise ValueError(
            f"off-policy correction {text!r} has mean-one and compares the new policy, whose mean "
            "weight is known only after the batch: leave mean-one out, or compare old/engine"
        )
    return terms


def _expanded(word: str) -> list[str]:
    """Return the terms of a preset with what was added to it, or the term itself."""
    name, *options = word.split(":")
    if name in ACTIONS:
        return [word]
    known = {**CORRECTION_PRESETS, **dict.fromkeys(ACTIONS, "")}
    terms = lookup(known, name, kind="off-policy correction").split()
    for option in options:
        terms = _with_option(terms, option, text=word)
    return terms


def _with_option(terms: list[str], option: str, *, text: str) -> list[str]:
    """Return the terms with an option added to its term; the last of equal keys counts."""
    if option in PAIRS:
        return [f"{term}:{option}" for term in terms]
    weights = [term for term in terms if term.startswith("weight")]
    if option == "mean-one":
        meant = weights
    elif option in SIGNS:
        meant = [term for term in terms if term not in weights]
    else:
        meant = [term for term in terms if "=" in term] or terms
    if len(meant) != 1:
        raise ValueError(
            f"off-policy correction {text!r} has {len(meant)} terms that {option} could belong to: "
            "write the terms out, and the option into one of them"
        )
    return [f"{term}:{option}" if term is meant[0] else term for term in terms]


def _term(text: str) -> CorrectionTerm:
    words, options = text.split(":")[:3], text.split(":")[3:]
    if len(words) < 3:
        raise ValueError(
            f"correction {text!r} is incomplete: expected ACTION:STATISTIC:LEVEL and bounds, such "
            f"as {EXAMPLES}"
        )
    bounds: dict[str, float] = {}
    for option in options:
        key, equals, value = option.partition("=")
        lookup(dict.fromkeys(OPTIONS), key + equals, kind=f"part of correction {text!r}")
        if equals:
            bounds[key] = _number(value, text)
    action, statistic, level = words
    return CorrectionTerm(
        action,
        statistic,
        level,
        low=bounds.get("low"),
        high=bounds.get("high"),
        sign=next((sign for sign in SIGNS if sign in options), None),
        mean_one="mean-one" in options,
        pair=next((word for word in reversed(options) if word in PAIRS), PAIRS[0]),
    )


def _number(text: str, term: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"correction {term!r}: {text!r} is not a number") from error

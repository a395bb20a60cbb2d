"""Weights of tokens: off-policy corrections and high-entropy tokens.

Sources: decoupled PPO, arXiv:2110.00641; IcePop, arXiv:2510.18855; DeepSeek-V3.2, arXiv:2512.02556;
high-entropy tokens, arXiv:2506.01939.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.config.parts.learning import AlgorithmOptions
from lightrft.tools.audit.pairs import HELD, Draw, Pair, row_lengths

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


@dataclass(frozen=True, slots=True)
class CorrectionWord:
    """One word of a correction: ACTION:STATISTIC:LEVEL and its options."""

    action: str
    statistic: str
    level: str
    options: tuple[str, ...] = ()

    def bound(self, name: str, none: float) -> float:
        """Return the last bound called `name`; `none` without."""
        bounds = [o.partition("=")[2] for o in self.options if o.startswith(f"{name}=")]
        return float(bounds[-1]) if bounds else none

    @property
    def sides(self) -> tuple[str, str]:
        """Names of the two compared policies."""
        pairs = ["old/engine", *(option for option in self.options if "/" in option)]
        first, _, second = pairs[-1].partition("/")
        return first, second


def parse(config: TrainConfig) -> tuple[CorrectionWord, ...]:
    """Return the terms of `off_policy_correction`; () without."""
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
    return tuple(CorrectionWord(p[0], p[1], p[2], tuple(p[3:])) for p in parts)


def _text(config: TrainConfig) -> str:
    """Return the option; by default tis for rows sampled by older weights, else ""."""
    text = config.off_policy_correction
    if text is None and (config.rollout_lag or config.stream_chunk):
        text = None if config.use_rollout_logprobs else "tis"
    if text is None or text in ("none", ("none",)):
        return ""
    return text if isinstance(text, str) else " ".join(text)


def _added(terms: list[str], option: str) -> list[str]:
    """Add an option to the one term that can have it; a pair of policies to all terms."""
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
    """Return whether a term reads the updated policy."""
    return any("new" in term.sides for term in parse(config))


def correction(
    terms: Sequence[CorrectionWord],
    policies: Mapping[str, Pair],
    advantages: Pair,
    mask: Tensor,
    draw: Draw,
) -> Tensor:
    """Return each token's loss factor: [rows, seq]; 0 where rejected or outside the mask.

    Args:
        terms: Terms of the correction.
        policies: Logprobs by policy: "old" of the trainer under the sampling distribution, "engine"
            and "new", the updated policy: [rows, seq] pairs.
        advantages: Advantages of the run and recomputed ones.
        mask: Tokens of an optimizer batch: [rows, seq] bool.
        draw: Draw that decides at bounds.
    """
    weights, is_rejected, scale = torch.ones_like(advantages.exact), torch.zeros_like(mask), 1.0
    for term in terms:
        low, high = term.bound("low", -math.inf), term.bound("high", math.inf)
        first, second = (policies[side] for side in term.sides)
        value = Pair(
            _value(term, first.exact, second.exact, mask), _value(term, first.run, second.run, mask)
        )
        if term.action == "weight":
            weights = value.exact.clamp(low, high)
            if "mean-one" in term.options:
                inside = torch.where(mask, weights, 0.0)
                each = (
                    inside[mask] if term.level == "token" else inside[mask.any(dim=1)].amax(dim=1)
                )
                scale = len(each) / float(each.sum()) if each.sum() > 0 else 1.0
            continue
        is_outside = ~draw.at_least(value, low) | draw.above(value, high)
        signs = _signs(term, first.less(second, mask), advantages, mask)
        if signs is not None:
            is_outside &= draw.above(signs, 0.0)
        is_outside &= mask
        if term.action == "veto" or term.level == "worst":
            is_outside = mask & is_outside.any(dim=1, keepdim=True)
        is_rejected |= is_outside
    return torch.where(mask & ~is_rejected, weights, 0.0) * scale


def _value(term: CorrectionWord, first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.where(mask, first - second, 0.0)
    if term.statistic == "ratio":
        return _at_level(term.level, ratio, mask).clamp(-HELD, HELD).exp()
    p, q = (torch.where(mask, each.exp(), 0.5) for each in (first, second))
    held = ratio.clamp(-HELD, HELD)
    values = {
        "distance": (held.exp() - 1).abs(),
        "k1": -ratio,
        "k2": ratio**2 / 2,
        "k3": torch.expm1(held) - held,
        "reverse_k3": torch.expm1(-held) + held,
        "difference": p - q,
        "variation": (p - q).abs(),
        "binary_kl": -q * ratio + _rest(q, q) - _rest(q, p),
    }[term.statistic]
    return _at_level(term.level, values, mask)


def _rest(q: Tensor, p: Tensor) -> Tensor:
    """Return (1 - q) ln(1 - p); 0 for q = 1."""
    return torch.where(q < 1, (1 - q) * torch.log1p(-p.clamp(max=1)), 0.0)


def _at_level(level: str, values: Tensor, mask: Tensor) -> Tensor:
    if level in ("token", "worst"):
        return values
    if level == "largest":
        largest = torch.where(mask, values, -math.inf).amax(dim=1, keepdim=True)
        return largest.expand_as(values)
    total = values.sum(dim=1, keepdim=True)
    return (total / row_lengths(mask) if level == "geometric" else total).expand_as(values)


def _signs(term: CorrectionWord, moved: Pair, advantages: Pair, mask: Tensor) -> Pair | None:
    """Return numbers that are positive where a term tests; None is everywhere."""
    if not set(SIGNS) & set(term.options):
        return None
    if "towards" in term.options:
        return Pair(moved.exact * advantages.exact, moved.run * advantages.run)
    if term.level in ("sequence", "geometric", "largest"):
        advantages = advantages.map(lambda each: _at_level("geometric", each, mask))
    return advantages.map(torch.neg) if "negative" in term.options else advantages


def high_entropy(entropy: Pair, mask: Tensor, draw: Draw, config: AlgorithmOptions) -> Tensor:
    """Return the tokens of highest entropy in the batch or in each row: [rows, seq] bool."""
    ratio = config.high_entropy_token_ratio
    if config.high_entropy_scope == "batch":
        if not mask.any():
            return mask
        above = entropy.map(lambda each: each - each[mask].quantile(1 - ratio))
        return mask & draw.at_least(above, 0.0)
    kept = torch.zeros_like(mask)
    for row, is_token in enumerate(mask):
        places = is_token.nonzero().flatten()
        count = max(min(1, len(places)), math.floor(len(places) * ratio + 1e-9))
        kept[row, places[draw.highest(entropy.at((row, places)), count)]] = True
    return kept

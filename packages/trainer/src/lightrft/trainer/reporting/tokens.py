"""Samples of a report token by token, each token with the numbers it can be shaded by."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.trainer.reporting.sample_page import readable, spread
from lightrft.trainer.runs.files import TRAJECTORIES_FILE, JsonLines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MAX_STEPS = 12
MAX_SAMPLES_PER_STEP = 6
MAX_TOKENS = 600
MAX_PROMPT_CHARACTERS = 2000
BYTE_BUDGET = 800_000
"""Of the data block in the page."""
QUANTITIES: Mapping[str, str] = {
    "advantage": "Advantage: above 0 the token is made likelier, below 0 less likely.",
    "probability": "Probability of the token under the policy that was about to be updated.",
    "ratio": "Trainer's over engine's probability of the token: 1 where both agree.",
    "entropy": "Entropy of the distribution the token was drawn from, in nats.",
}
"""What tokens can be shaded by, and what it means."""


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """What is shown token by token.

    Args:
        steps: Step and samples, newest first, as the page's script reads them.
        quantities: Those of `QUANTITIES` that a sample has.
        num_steps: Steps in the file.
        num_unreadable: Lines left out.
    """

    steps: tuple[dict[str, object], ...]
    quantities: Mapping[str, str]
    num_steps: int
    num_unreadable: int

    def as_json(self) -> dict[str, object]:
        """For the page's data block."""
        return {"steps": list(self.steps)}


def choose_tokens(folder: Path) -> TokenChoice:
    """Samples of up to 12 steps of trajectories.jsonl, spread over the run, the last step included.

    The file is read twice, line by line: it may be larger than memory.
    """
    lines = JsonLines(folder / TRAJECTORIES_FILE)
    steps = sorted({step for step, _ in lines})
    chosen: dict[int, list[dict[str, object]]] = {step: [] for step in spread(steps, MAX_STEPS)}
    for step, entry in lines:
        if step in chosen and len(chosen[step]) < MAX_SAMPLES_PER_STEP:
            sample = token_sample(entry)
            if sample is not None:
                chosen[step].append(sample)
    budget, shown = BYTE_BUDGET, list[dict[str, object]]()
    for step in sorted(chosen, reverse=True):
        budget -= len(json.dumps(chosen[step]))
        if budget < 0:
            break
        if chosen[step]:
            shown.append({"step": step, "samples": chosen[step]})
    present = {name for step in shown for sample in _samples(step) for name in sample}
    return TokenChoice(
        tuple(shown),
        {name: text for name, text in QUANTITIES.items() if name in present},
        len(steps),
        lines.num_unreadable,
    )


def token_sample(entry: Mapping[str, object]) -> dict[str, object] | None:
    """One line of the file for the page; None if it holds no tokens.

    Returns:
        prompt, reward, tokens, num_tokens, truncated, and one number per token (None where it is
        not finite) for each of `QUANTITIES` that the line has.
    """
    tokens = entry.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        return None
    logprobs, of_engine = _numbers(entry, "logprobs"), _numbers(entry, "rollout_logprobs")
    masses = _numbers(entry, "log_kept_mass") or [0.0] * len(logprobs)
    per_token = {
        "advantage": _numbers(entry, "advantages"),
        "probability": [_exp(value) for value in logprobs],
        "ratio": [
            _exp(None if mine is None or other is None or mass is None else mine - mass - other)
            for mine, other, mass in zip(logprobs, of_engine, masses, strict=False)
        ],
        "entropy": _numbers(entry, "entropy"),
    }
    shown = tokens[:MAX_TOKENS]
    sample: dict[str, object] = {
        "prompt": readable(str(entry.get("prompt", "")), max_characters=MAX_PROMPT_CHARACTERS),
        "reward": _rounded(entry.get("reward")),
        "truncated": entry.get("truncated") is True,
        "num_tokens": len(tokens),
        "tokens": [readable(str(token)) for token in shown],
    }
    whole = {name: found for name, found in per_token.items() if len(found) == len(tokens)}
    return sample | {name: list(map(_rounded, found[:MAX_TOKENS])) for name, found in whole.items()}


def _samples(step: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    samples = step["samples"]
    return samples if isinstance(samples, list) else []


def _numbers(entry: Mapping[str, object], name: str) -> list[float | None]:
    values = entry.get(name)
    return [_rounded(value) for value in values] if isinstance(values, list) else []


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(min(value, 50.0))


def _rounded(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")

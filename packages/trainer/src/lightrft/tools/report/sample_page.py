"""The samples that a report shows: few steps, spread over the run, within a number of bytes."""

import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lightrft.config.options import is_number
from lightrft.reporting.files import SAMPLES_FILE, TRAJECTORIES_FILE, JsonLines
from lightrft.tools.report.charts import format_number

MAX_CHARACTERS = 6000
# Limits of a conversation.
MAX_PARTS, MAX_PART_CHARACTERS = 32, 2000
# Limit of a prompt whose response is shown token by token.
MAX_PROMPT_CHARACTERS = 2000
MAX_TOKENS = 600
# Pictures of a row, and characters of each: 96 x 96 pixels of noise take 11,600.
MAX_THUMBNAILS, MAX_THUMBNAIL_CHARACTERS = 4, 16_000
_THUMBNAIL = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]+={0,2}")
# Limits of all texts and of all tokens in the page.
BYTE_BUDGET, TOKEN_BYTE_BUDGET = 1_200_000, 800_000
# Quantities that tokens can be shaded by, with their meanings.
QUANTITIES: Mapping[str, str] = {
    "advantage": "Advantage: above 0 the token is made likelier, below 0 less likely.",
    "probability": "Probability of the token under the policy that was about to be updated.",
    "ratio": "Trainer's over engine's probability of the token: 1 where both agree.",
    "entropy": "Entropy of the distribution the token was drawn from, in nats.",
}

# Fields of one sample on the page, by name.
Sample = dict[str, object]


@dataclass(frozen=True, slots=True)
class SampleChoice:
    """The shown part of a file of samples.

    Args:
        steps: Samples by step, newest first.
        num_steps: Steps in the file.
        num_unreadable: Lines left out.
        telling_step: Step of `steps` to show first: where rewards differ most, or else the newest;
            None without steps.
    """

    steps: Mapping[int, Sequence[Sample]]
    num_steps: int
    num_unreadable: int
    telling_step: int | None = None


def choose_samples(folder: Path) -> SampleChoice:
    """Return samples of up to 24 steps, lowest reward first, with the last and the telling step."""
    return _choose(
        JsonLines(folder / SAMPLES_FILE),
        lambda entries: _counted([_as_text(entry) for entry in sorted(entries, key=_reward)]),
        lambda samples: len(html.escape(json.dumps(samples, ensure_ascii=False)).encode()),
        max_steps=24,
        max_samples=8,
        budget=BYTE_BUDGET,
    )


def by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Group samples of equal prompts and images, in the order in which each first comes."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(json.dumps([sample["prompt"], sample["images"]]), []).append(sample)
    return list(groups.values())


def choose_tokens(folder: Path) -> SampleChoice:
    """Return samples of up to 12 steps token by token, with the last and the telling step."""
    return _choose(
        JsonLines(folder / TRAJECTORIES_FILE),
        lambda entries: [
            sample for entry in entries if (sample := token_sample(entry)) is not None
        ],
        lambda samples: len(json.dumps(samples)),
        max_steps=12,
        max_samples=6,
        budget=TOKEN_BYTE_BUDGET,
    )


def token_sample(entry: Mapping[str, object]) -> Sample | None:
    """Return one line of trajectories.jsonl for the page; None if it holds no tokens.

    Returns:
        prompt, reward, tokens, num_tokens, truncated, observed (which tokens nobody sampled), and
        one number per token (None where it is not finite) for each of `QUANTITIES` that the line
        has.
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
    sample: Sample = {
        "prompt": readable(str(entry.get("prompt", "")), max_characters=MAX_PROMPT_CHARACTERS),
        "reward": _rounded(entry.get("reward")),
        "truncated": entry.get("truncated") is True,
        "num_tokens": len(tokens),
        "tokens": [readable(str(token)) for token in tokens[:MAX_TOKENS]],
        "observed": _observed(entry, len(tokens))[:MAX_TOKENS],
    }
    whole = {name: numbers for name, numbers in per_token.items() if len(numbers) == len(tokens)}
    return sample | {
        name: list(map(_rounded, numbers[:MAX_TOKENS])) for name, numbers in whole.items()
    }


def readable(text: str, *, max_characters: int = MAX_CHARACTERS) -> str:
    """Return text with visible control characters, cut after `max_characters`."""
    cut = text[:max_characters]
    shown = "".join(
        chr(0x2400 + ord(char)) if ord(char) < 32 and char not in "\n\t" else char for char in cut
    )
    shown = shown.encode("utf-8", "replace").decode("utf-8")  # halves of surrogate pairs
    return shown if cut == text else f"{shown}\n[cut here: {len(text)} characters in all]"


def _choose(
    lines: JsonLines,
    convert: Callable[[list[dict[str, object]]], list[Sample]],
    num_bytes: Callable[[list[Sample]], int],
    *,
    max_steps: int,
    max_samples: int,
    budget: int,
) -> SampleChoice:
    """Choose evenly spaced steps whose samples fit into the budget, the newest first.

    The file is read twice, line by line: it may be larger than memory.
    """
    spreads = _reward_spreads(lines, max_samples)
    steps = sorted(spreads)
    num_shown = min(len(steps), max_steps)
    places = [(len(steps) - 1) * i // max(num_shown - 1, 1) for i in range(num_shown)]
    telling = max(steps, key=lambda step: (spreads[step], step), default=None)
    chosen = {steps[place] for place in places} | ({telling} if telling is not None else set())
    entries: dict[int, list[dict[str, object]]] = {step: [] for step in sorted(chosen)[::-1]}
    for step, entry in lines:
        if step in entries and len(entries[step]) < max_samples:
            entries[step].append(entry)
    shown: dict[int, list[Sample]] = {}
    for step in sorted(entries, key=lambda step: (step != telling, -step)):
        samples = convert(entries[step])
        budget -= num_bytes(samples)
        if budget < 0:
            break
        if samples:
            shown[step] = samples
    shown = dict(sorted(shown.items(), reverse=True))
    first = telling if telling in shown else next(iter(shown), None)
    return SampleChoice(shown, len(steps), lines.num_unreadable, first)


def _reward_spreads(lines: JsonLines, max_samples: int) -> dict[int, float]:
    """Return the spread of rewards by step, over the samples that a page may show."""
    rewards: dict[int, list[float]] = {}
    for step, entry in lines:
        step_rewards = rewards.setdefault(step, [])
        if len(step_rewards) < max_samples:
            step_rewards.append(_reward(entry))
    return {step: max(step_rewards) - min(step_rewards) for step, step_rewards in rewards.items()}


def _counted(samples: Sequence[Sample]) -> list[Sample]:
    """Merge equal samples into one, with their number."""
    counted: list[Sample] = []
    for sample in samples:
        like = next(
            (other for other in counted if other == sample | {"count": other["count"]}), None
        )
        if like is None:
            counted.append(sample | {"count": 1})
        else:
            like["count"] = cast("int", like["count"]) + 1
    return counted


def _reward(entry: Mapping[str, object]) -> float:
    value = entry.get("reward")
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(cast("float", value)) if is_number else 0.0


def _as_text(entry: Mapping[str, object]) -> Sample:
    """Return one sample as text that any terminal or browser shows unchanged."""
    components = entry.get("components")
    pairs = components.items() if isinstance(components, Mapping) else ()
    names = ("prompt", "response", "label", "reward", "response_length")
    return {
        **{name: _text(entry.get(name)) for name in names},
        "components": "\n".join(f"{_text(name)} {_text(value)}" for name, value in pairs),
        "images": shown_thumbnails(entry.get("images")),
        "turns": _turns(entry.get("turns")),
        "branches": _branches(entry.get("branches")),
        "is_truncated": entry.get("truncated") is True,
    }


def _turns(value: object) -> list[tuple[str, str]]:
    """Return (who, text) of each part of a conversation: the model's words, and the answers."""
    parts = []
    for turn in value if isinstance(value, list) else []:
        if not isinstance(turn, Mapping):
            continue
        calls = turn.get("calls")
        answered = (
            [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
        )
        parts.append(("model", turn.get("said", "")))
        parts += [(_answerer(call), call.get("answer", "")) for call in answered]
    shown = [
        (who, readable(str(text), max_characters=MAX_PART_CHARACTERS))
        for who, text in parts[:MAX_PARTS]
    ]
    num_left = len(parts) - len(shown)
    return [*shown, ("", f"[{num_left} more]")] if num_left else shown


def _branches(value: object) -> list[tuple[str, list[str]]]:
    """Return (place, texts) of each branch of an episode."""
    branches = []
    for number, row in enumerate(value[:MAX_PARTS] if isinstance(value, list) else [], 1):
        fields = row if isinstance(row, Mapping) else {}
        said, after, parent = (fields.get(name) for name in ("said", "after", "of"))
        where = f" of branch {_text(parent)}" if parent else ""
        texts = said[:MAX_PARTS] if isinstance(said, list) else []
        shown = [readable(str(text), max_characters=MAX_PART_CHARACTERS) for text in texts]
        branches.append((f"branch {number}, after turn {_text(after)}{where}", shown))
    return branches


def _answerer(call: Mapping[str, object]) -> str:
    """Return the tool's name, and what was wrong with its call."""
    name, outcome = _text(call.get("name")) or "call", _text(call.get("outcome"))
    return name if outcome in ("", "ok") else f"{name}: {outcome}"


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return format_number(value) if math.isfinite(value) else str(value)
    return readable(str(value))


def _numbers(entry: Mapping[str, object], name: str) -> list[float | None]:
    values = entry.get(name)
    return [_rounded(value) for value in values] if isinstance(values, list) else []


def _observed(entry: Mapping[str, object], num_tokens: int) -> list[bool]:
    """Return marks of the tokens that are part of an observation."""
    spans = entry.get("sampled_spans")
    if not isinstance(spans, list):
        return [False] * num_tokens
    sampled: set[int] = set()
    for span in spans:
        if isinstance(span, list) and len(span) == 2 and all(isinstance(i, int) for i in span):
            sampled |= set(range(max(0, span[0]), min(span[1], num_tokens)))
    return [position not in sampled for position in range(num_tokens)]


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(min(value, 50.0))


def _rounded(value: object) -> float | None:
    if not is_number(value) or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")


def shown_thumbnails(value: object) -> list[str]:
    """Return a line's pictures that a page may show; everything else is left out."""
    listed = value if isinstance(value, list) else []
    return [
        text
        for text in listed[:MAX_THUMBNAILS]
        if isinstance(text, str)
        and len(text) <= MAX_THUMBNAIL_CHARACTERS
        and _THUMBNAIL.fullmatch(text)
    ]

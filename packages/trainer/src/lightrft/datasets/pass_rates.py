"""Pass rates of prompts: the file that `lightrft eval --rates` writes, and the prompts it keeps."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lightrft.config import RateOptions
from lightrft.config.files import FileError, lines_of, parse_json, typed
from lightrft.config.parts.data import rate_bounds
from lightrft.config.toml import write_whole
from lightrft.datasets.types import DataError, Prompt


@dataclass(frozen=True, slots=True)
class PassRate:
    """Samples of a prompt, and how many of them were right.

    Args:
        num_right, num_samples: Counts.
    """

    num_right: int
    num_samples: int

    @property
    def rate(self) -> float:
        """Share of right samples."""
        return self.num_right / self.num_samples

    @property
    def spread(self) -> float:
        """Expected variance of a sample: r (1 - r) with r = (right + 1) / (samples + 2)."""
        smoothed = (self.num_right + 1) / (self.num_samples + 2)
        return smoothed * (1 - smoothed)


@dataclass(frozen=True, slots=True)
class RateLine:
    """Line of a file of rates.

    Args:
        prompt: See `hash_of_prompt`.
        row: Number of the row in its data.
        pass_rate: num_right / num_samples.
        num_right, num_samples: Counts.
    """

    prompt: str
    row: int
    pass_rate: float
    num_right: int
    num_samples: int


def hash_of_prompt(prompt: Prompt) -> str:
    """Return the hash by which rates find a prompt: of its tokens and media."""
    digest = hashlib.sha256(np.asarray(prompt.token_ids, dtype="<u4").tobytes())
    for medium in prompt.media:
        digest.update(medium.digest.encode())
    return digest.hexdigest()


def read_rates(path: str | Path) -> dict[str, PassRate]:
    """Return the rate of each prompt of a file; lines of one prompt are added up.

    Raises:
        FileError: The file cannot be read, or holds no rates.
    """
    rates: dict[str, PassRate] = {}
    for number, line in enumerate(lines_of(Path(path)), start=1):
        place = f"{path}:{number}"
        entry = typed(RateLine, parse_json(line, place), place, skips_unknown=True)
        if not 0 <= entry.num_right <= entry.num_samples or entry.num_samples == 0:
            raise FileError(
                f"{place}: expected 0 <= num_right <= num_samples and a sample or more: got "
                f"{entry.num_right} and {entry.num_samples}"
            )
        before = rates.get(entry.prompt, PassRate(0, 0))
        rates[entry.prompt] = PassRate(
            before.num_right + entry.num_right, before.num_samples + entry.num_samples
        )
    if not rates:
        raise FileError(f"{path} holds no rates: write them with lightrft eval --rates")
    return rates


def write_rates(path: Path, prompts: Sequence[Prompt], counts: Sequence[PassRate]) -> None:
    """Write a line for each prompt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = zip(prompts, counts, strict=True)
    rows = [RateLine(hash_of_prompt(p), p.id, c.rate, c.num_right, c.num_samples) for p, c in pairs]
    write_whole(path, "".join(json.dumps(asdict(each)) + "\n" for each in rows))


def rated_prompts(
    path: str, prompts: Sequence[Prompt], locations: Sequence[str], config: RateOptions
) -> tuple[list[int], list[PassRate], str]:
    """Return places and rates of the prompts that `prompt_pass_rate` keeps, and a remark.

    Args:
        path: File of rates.
        prompts: All prompts.
        locations: File and line of each, to say where the others come from.
        config: Options of rates.

    Raises:
        DataError: A prompt has no rate, or none is kept.
        FileError: The file of rates cannot be read.
    """
    known = read_rates(path)
    looked_up = [known.get(hash_of_prompt(prompt)) for prompt in prompts]
    lacking = [where for where, rate in zip(locations, looked_up, strict=True) if rate is None]
    if lacking:
        raise DataError(
            f"{path} has no rate for {len(lacking)} of {len(prompts)} prompts (first: "
            f"{lacking[0]}): measure them with lightrft eval --rates, with the options of this run "
            "that make prompts"
        )
    rates = [rate for rate in looked_up if rate is not None]
    if config.prompt_pass_rate is None:
        return [*range(len(prompts))], rates, ""
    low, high = rate_bounds(config.prompt_pass_rate) or (0.0, 1.0)
    kept = [place for place, each in enumerate(rates) if low <= each.rate <= high]
    below = sum(each.rate < low for each in rates)
    counts = f"{below} are below, {len(rates) - below - len(kept)} above"
    if not kept:
        raise DataError(
            f"{path}: no prompt has a pass rate from {low:g} to {high:g}: {counts}; widen "
            "prompt_pass_rate"
        )
    remark = (
        f"kept {len(kept)} of {len(prompts)} prompts with a pass rate from {low:g} to {high:g}; "
        f"{counts}"
    )
    sources = [_source(where) for where in locations]
    if len(set(sources)) > 1:
        remark += f"; {_by_source(sources, kept)}"
    return kept, [rates[place] for place in kept], remark


def _source(location: str) -> str:
    """Return the file of a row's location."""
    head, _, tail = location.rpartition(":")
    return head if tail.isdigit() else location.partition(", row ")[0]


def _by_source(sources: Sequence[str], kept: Sequence[int]) -> str:
    whole: Mapping[str, int] = Counter(sources)
    left = Counter(sources[place] for place in kept)
    return ", ".join(f"{left[name]} of {count} from {name}" for name, count in whole.items())

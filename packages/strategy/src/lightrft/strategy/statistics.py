"""Distribution of generation lengths over ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightrft.strategy.distributed import Group, gather_objects

if TYPE_CHECKING:
    from collections.abc import Sequence

PERCENTILES = (50, 80, 95)
MAX_BARS = 40
PLOT_WIDTH, PLOT_HEIGHT = 600, 300


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Generated tokens per completion, over all ranks of a step.

    Args:
        total_samples: Completions.
        min_length, max_length, mean_length, median_length: In tokens.
        percentiles: Percent -> tokens (linear interpolation).
    """

    total_samples: int
    min_length: int
    max_length: int
    mean_length: float
    median_length: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthStatistics:
        """Statistics of a non-empty list of lengths."""
        values = np.asarray(lengths)
        return cls(
            total_samples=len(values),
            min_length=int(values.min()),
            max_length=int(values.max()),
            mean_length=float(values.mean()),
            median_length=float(np.median(values)),
            percentiles={p: float(np.percentile(values, p)) for p in PERCENTILES},
        )


class GenLenAnalyser:
    """Collects generation lengths every N steps and writes them as JSON and as a picture.

    Args:
        plot_every: Interval in steps; 0 or less switches the analyser off.
        log_dir: Folder for `gen_len_step_{step}.json` and `.svg`; None writes nothing.
        group: Ranks to collect from; None is all.
    """

    def __init__(self, *, plot_every: int, log_dir: str | None, group: Group = None) -> None:
        self.plot_every = plot_every
        self.log_dir = None if log_dir is None else Path(log_dir)
        self.group = group

    def is_due(self, step: int) -> bool:
        """Whether `collect` does anything at this step; equal on all ranks."""
        return self.plot_every > 0 and step % self.plot_every == 0

    def collect(
        self, lengths: Sequence[int], step: int, *, writes_files: bool
    ) -> LengthStatistics | None:
        """Statistics over all ranks, whose counts may differ. Collective when due.

        Args:
            lengths: Generated tokens of each of this rank's completions.
            step: Number of the generation call.
            writes_files: Whether this rank writes the files.

        Returns:
            None if not due, or if nothing was generated anywhere.
        """
        if not self.is_due(step):
            return None
        everything = [n for part in gather_objects(list(lengths), self.group) for n in part]
        if not everything:
            return None
        found = LengthStatistics.of(everything)
        if writes_files and self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            stem = self.log_dir / f"gen_len_step_{step}"
            record = {"step": step, **asdict(found), "lengths": everything}
            stem.with_suffix(".json").write_text(json.dumps(record), encoding="utf-8")
            title = f"generated tokens per completion, step {step}, mean {found.mean_length:.1f}"
            stem.with_suffix(".svg").write_text(draw_histogram(everything, title), encoding="utf-8")
        return found


def draw_histogram(lengths: Sequence[int], title: str) -> str:
    """A histogram as SVG text, with at most 40 bars.

    Args:
        lengths: At least one number.
        title: Written above the bars.
    """
    counts, edges = np.histogram(np.asarray(lengths), bins=min(MAX_BARS, len(set(lengths))))
    width = PLOT_WIDTH / len(counts)
    tallest = int(counts.max())
    bars = [
        f'<rect x="{i * width:.2f}" y="{PLOT_HEIGHT * (1 - count / tallest):.2f}" '
        f'width="{0.95 * width:.2f}" height="{PLOT_HEIGHT * count / tallest:.2f}">'
        f"<title>{edges[i]:.0f} to {edges[i + 1]:.0f}: {count}</title></rect>"
        for i, count in enumerate(counts.tolist())
    ]
    labels = [
        f'<text x="0" y="-10">{title}</text>',
        f'<text x="-5" y="10" text-anchor="end">{tallest}</text>',
        f'<text x="0" y="{PLOT_HEIGHT + 18}">{edges[0]:.0f}</text>',
        f'<text x="{PLOT_WIDTH}" y="{PLOT_HEIGHT + 18}" text-anchor="end">{edges[-1]:.0f}</text>',
    ]
    box = f"-60 -30 {PLOT_WIDTH + 80} {PLOT_HEIGHT + 60}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" '
            'font-size="12" fill="#4472a8">',
            *bars,
            *labels,
            "</svg>",
            "",
        ]
    )

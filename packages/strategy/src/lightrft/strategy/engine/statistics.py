"""Distribution of generation lengths over ranks."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lightrft.strategy.distributed.collectives import Group, gather_objects

PERCENTILES = (50, 80, 95)
MAX_BARS = 40


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
        log_dir: Folder for `gen_len_step_{step}.json` and `.png`; None writes nothing.
        group: Ranks to collect from; None is all.

    Raises:
        ImportError: Pictures are asked for and matplotlib is not installed.
    """

    def __init__(self, *, plot_every: int, log_dir: str | None, group: Group = None) -> None:
        self.plot_every = plot_every
        self.log_dir = None if log_dir is None else Path(log_dir)
        self.group = group
        if plot_every > 0 and log_dir is not None:
            require_matplotlib()

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
            stem.with_suffix(".png").write_bytes(histogram_png(everything, step=step))
        return found


def require_matplotlib() -> None:
    """Finds out before a run, not at its first picture, whether pictures can be drawn.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "plot_every > 0 together with log_dir draws histograms and needs the package "
            "matplotlib: install it, or leave plot_every at -1"
        ) from error


def histogram_png(lengths: Sequence[int], *, step: int) -> bytes:
    """A histogram with at most 40 bars.

    Args:
        lengths: At least one number.
        step: Named in the title, with the mean.

    Returns:
        The contents of a PNG file.
    """
    # The object interface: a figure that pyplot does not know of goes away with its last name.
    from matplotlib.figure import Figure

    values = np.asarray(lengths)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(values, bins=min(MAX_BARS, len(np.unique(values))))
    axes.set_xlabel("generated tokens")
    axes.set_ylabel("completions")
    axes.set_title(
        f"step {step}: mean {values.mean():.1f}, shortest {values.min()}, longest {values.max()}"
    )
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()

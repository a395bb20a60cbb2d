"""A histogram as a PNG image; the one module that imports matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BARS = 40


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

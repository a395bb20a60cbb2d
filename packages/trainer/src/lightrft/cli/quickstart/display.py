"""What the quick start shows while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

BAR_WIDTH = 30


class LiveReward:
    """A line a step: the mean reward of the samples as number and bar, and held-out accuracy.

    Args:
        stream: Where to write; what the run itself prints goes elsewhere.
        num_steps: Steps of the whole run.
    """

    def __init__(self, stream: TextIO, *, num_steps: int) -> None:
        self._stream = stream
        self._num_steps = num_steps

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the line of a step."""
        line = f"  step {step:>3}/{self._num_steps}"
        if "reward" in metrics:
            reward = metrics["reward"]
            line += f"  reward {reward:.3f} |{'#' * round(BAR_WIDTH * reward):<{BAR_WIDTH}}|"
        if "eval/reward" in metrics:
            line += f"  held-out accuracy {metrics['eval/reward']:.3f}"
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Has nothing pending."""

"""What goes wrong in reward code."""

from __future__ import annotations


class RewardError(RuntimeError):
    """A reward could not be computed; the message names the function, the sample and the cause."""

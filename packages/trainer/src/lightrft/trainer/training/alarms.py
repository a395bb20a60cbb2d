"""Bounds of metrics beyond which a run has probably gone wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Alarms:
    """What is too much or too little; None is off.

    A log-probability that is not a number is always too much: `correction_invalid_share`.

    Args:
        max_kl: Of `kl` (to the reference model, per token) and `approx_kl` (of the update).
        min_entropy: Of `entropy`, in nats.
        max_length: Of `response_length`, in tokens.
        min_reward_std: Of `reward_std`.
        stops: End the run after the step, with a checkpoint.
    """

    max_kl: float | None = None
    min_entropy: float | None = None
    max_length: float | None = None
    min_reward_std: float | None = None
    stops: bool = False

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """One sentence for each metric out of bounds."""
        uppers = (
            ("kl", self.max_kl),
            ("approx_kl", self.max_kl),
            ("response_length", self.max_length),
            ("correction_invalid_share", 0.0),
        )
        lowers = (("entropy", self.min_entropy), ("reward_std", self.min_reward_std))
        return [
            f"{name} is {metrics[name]:.4g}, above {bound:g}"
            for name, bound in uppers
            if bound is not None and name in metrics and metrics[name] > bound
        ] + [
            f"{name} is {metrics[name]:.4g}, below {bound:g}"
            for name, bound in lowers
            if bound is not None and name in metrics and metrics[name] < bound
        ]

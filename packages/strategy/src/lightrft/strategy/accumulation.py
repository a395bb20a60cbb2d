"""Counting micro-batches of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class AccumulationState:
    """How far one optimizer is inside its current optimizer step.

    Backends ask `loss_scale` and `is_last` in `backward`, and `advance` in `optimizer_step`.

    Args:
        num_micro_batches: Micro-batches of one optimizer step.
        takes_shares: The loss is this micro-batch's share of the batch loss (inside
            `StrategyBase.accumulation`) rather than the micro-batch's mean.
        num_done: Micro-batches of the current step whose `optimizer_step` has been called.
        sp_size: Ranks that work on one micro-batch together; their gradients are parts of one.
    """

    num_micro_batches: int
    takes_shares: bool = False
    num_done: int = 0
    sp_size: int = 1

    def loss_scale(self, num_averaging_ranks: int) -> float:
        """Factor that turns the caller's loss into the one to differentiate.

        Args:
            num_averaging_ranks: Ranks over which the backend averages gradients.
        """
        if self.takes_shares:
            return float(num_averaging_ranks)
        # The mean is over the micro-batches of all data-parallel groups, not of all ranks.
        return self.sp_size / self.num_micro_batches

    def is_last(self) -> bool:
        """Whether the current micro-batch is the one after which the optimizer acts."""
        return self.num_done == self.num_micro_batches - 1

    def advance(self) -> bool:
        """Counts one call of `optimizer_step`.

        Returns:
            Whether the optimizer must act now; the count then starts again (seed way).

        Raises:
            RuntimeError: More calls than `accumulation` announced.
        """
        if self.num_done >= self.num_micro_batches:
            raise RuntimeError(
                f"optimizer_step was called more than {self.num_micro_batches} times inside "
                "strategy.accumulation: announce the right number of micro-batches"
            )
        acts = self.is_last()
        self.num_done += 1
        if acts and not self.takes_shares:
            self.num_done = 0
        return acts

"""Counting micro-batches of one optimizer step."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.optim import Optimizer


@dataclass(slots=True)
class AccumulationState:
    """Progress of one optimizer inside its current optimizer step.

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


class Accumulations:
    """The state of every optimizer that is inside a step."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[Optimizer, AccumulationState] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, optimizer: Optimizer, num_micro_batches: int, sp_size: int) -> AccumulationState:
        """Progress of an optimizer; one in no step begins a step of that many micro-batches."""
        if optimizer not in self._states:
            self._states[optimizer] = AccumulationState(num_micro_batches, sp_size=sp_size)
        return self._states[optimizer]

    @contextmanager
    def announced(
        self, counts: Sequence[int], optimizer: Optimizer, *, discard: Callable[[], None]
    ) -> Iterator[None]:
        """See `StrategyBase.accumulation`.

        Args:
            counts: The number of micro-batches that each rank announces.
            optimizer: Whose step it is.
            discard: Drops what was accumulated, which must not leak into the next step.
        """
        count = counts[0]
        if min(counts) < 1 or min(counts) != max(counts):
            raise ValueError(
                f"num_micro_batches must be the same positive number on all ranks: got {counts}"
            )
        outer = self._states.get(optimizer)
        if outer is not None and (outer.takes_shares or outer.num_done > 0):
            raise RuntimeError(
                f"accumulation entered in the middle of an optimizer step ({outer.num_done} of "
                f"{outer.num_micro_batches} micro-batches done)"
            )
        state = self._states[optimizer] = AccumulationState(count, takes_shares=True)
        try:
            yield
            if state.num_done != count:
                raise RuntimeError(
                    f"accumulation left after {state.num_done} of {count} micro-batches: call "
                    "backward and optimizer_step for each"
                )
        except BaseException:
            discard()
            raise
        finally:
            del self._states[optimizer]

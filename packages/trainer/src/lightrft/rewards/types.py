"""The interface of reward functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

# What is scored, one entry per response; columns by name.
Texts = Sequence[str]
Labels = Sequence[str | None]
Columns = Mapping[str, Sequence[object]]


class RewardError(RuntimeError):
    """A reward could not be computed; the message names the function, the sample and the cause."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The reward of one response.

    Args:
        reward: The number to maximise.
        components: What it is made of, by name, unweighted.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)


class RewardFunction(Protocol):
    """Scores responses; holds processes, so it must be closed."""

    @property
    def name(self) -> str:
        """Name of the function and of its component."""
        ...

    @property
    def needs_labels(self) -> bool:
        """Every row must have a label."""
        ...

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult]:
        """One result per response, in order.

        Args:
            prompts: Rendered prompts.
            responses: Decoded responses, without the prompt.
            labels: Reference answers.
            columns: The other columns of the data rows.

        Raises:
            RewardError: a reward could not be computed.
        """
        ...

    def close(self) -> None:
        """Ends the worker processes; may be called twice."""
        ...


@runtime_checkable
class CallStyle(Protocol):
    """The way to call a reward; one that does not say so is called in the trainer's thread.

    Either way it gets one group of responses in a call.
    """

    @property
    def parallel_calls(self) -> int:
        """Calls that it answers at once, each in a thread; 0: only in the trainer's thread."""
        ...

    @property
    def whole_batch(self) -> bool:
        """It gets all responses of a rank in one call, in the trainer's thread."""
        ...


@runtime_checkable
class ChecksLabels(Protocol):
    """A reward that knows which labels it can use."""

    def label_problem(self, label: str | None) -> str | None:
        """The reason why no response to a row with this label can be right; None if one can."""
        ...

"""The interface of reward functions."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from lightrft.engines.base import RolloutEngine

# What is scored, one entry per response; columns by name.
Texts = Sequence[str]
Labels = Sequence[str | None]
Columns = Mapping[str, Sequence[object]]
# A total and what it is the total of, by the name of a metric: the mean over all ranks is reported,
# or, where the second is None, the sum.
Tallies = Mapping[str, tuple[float, float | None]]
# Columns of media, beside those of the data: of each response a `Media` of its prompt.
MEDIA_COLUMNS = ("images", "videos", "audios")
# All that is offered beside the columns of the data: of each response also its conversation.
CONVERSATIONS = "conversations"
OFFERED_COLUMNS = (*MEDIA_COLUMNS, CONVERSATIONS)
# Beside these, where an environment is played: of each response what its environment kept.
ENVIRONMENTS = "environments"


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


# In the place of a reward that could not be decided: no failure of the function. Told by identity.
UNDECIDED = RewardResult(math.nan, {"undecided": 1.0})
# Where a function says None, as TRL's do of rows that are others' to score. Told by identity.
NOT_SCORED = RewardResult(0.0)


@dataclass(frozen=True, slots=True)
class KeptEnvironment:
    """An environment as it crosses processes.

    Args:
        class_name: Of the author's class.
        attributes: By name `{"json": value}`, `{"pickle": base64}` or `{"error": text}`.
    """

    class_name: str = ""
    attributes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


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
    ) -> Sequence[RewardResult | None]:
        """One result per response, in order; None for one that could not be decided.

        That response alone is left out of the loss, whatever `--reward_failure` says: what a model
        writes must neither end a run nor earn a number that nobody computed.

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

    Args:
        parallel_calls: Calls that it answers at once, each in a thread; 0: only in the trainer's
            thread.
        whole_batch: It gets all responses of a rank in one call, in the trainer's thread.
    """

    parallel_calls: int
    whole_batch: bool


@runtime_checkable
class UsesEngine(Protocol):
    """A reward that asks the engine of the run, between batches and in the trainer's thread."""

    def use_engine(self, engine: "RolloutEngine") -> None:
        """Gives it the engine, which is awake and samples nothing else."""
        ...


@runtime_checkable
class CountsCosts(Protocol):
    """A reward that knows what it costs."""

    def take_tallies(self) -> Tallies:
        """Sums since the last time; the same names on every rank."""
        ...


@runtime_checkable
class ChecksLabels(Protocol):
    """A reward that knows which labels it can use."""

    def label_problem(self, label: str | None) -> str | None:
        """The reason why no response to a row with this label can be right; None if one can."""
        ...


@runtime_checkable
class TakesColumns(Protocol):
    """A reward function whose signature names columns of the data.

    Args:
        options: Of `reward_args`, those that it takes.
        label_use: "labels" where it reads labels as such, "column" where it only names the label's
            column or takes everything, "" where it is not given the label.
    """

    options: Mapping[str, object]
    label_use: Literal["labels", "column", ""]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises a RewardError if a column that it needs is missing."""
        ...

    def try_out(self, prompts: Texts, labels: Labels, columns: Columns) -> None:
        """Raises a RewardError if it cannot score responses that are the labels."""
        ...


@runtime_checkable
class ReadsEnvironments(Protocol):
    """A reward that may read what environments kept at the end of their episodes.

    Args:
        reads_environments: It does: the column `environments` must be offered.
    """

    reads_environments: bool


@dataclass(frozen=True, slots=True)
class RewardRecipes:
    """Weights of rewards by the value that a row has in one column.

    Args:
        column: Of the data rows.
        weights: Value of the column -> name of a reward -> its weight. A reward that is not named
            is not asked for these rows.
    """

    column: str
    weights: Mapping[str, Mapping[str, float]]

    def weights_of(self, value: object) -> Mapping[str, float]:
        """The weights of a row with this value.

        Raises:
            RewardError: There is no recipe for it.
        """
        if not isinstance(value, str) or value not in self.weights:
            raise RewardError(
                f"no reward recipe for {value!r} in column {self.column!r}: known are "
                f"{', '.join(sorted(self.weights))}; add a table to --reward_recipe"
            )
        return self.weights[value]

"""The interface of reward functions."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from lightrft.engines.base import RolloutEngine

# Scored texts, one entry per response; columns by name.
Texts = Sequence[str]
Labels = Sequence[str | None]
Columns = Mapping[str, Sequence[object]]
# Total and its count by the name of a metric. The mean over all ranks is reported, or the sum if
# the count is None.
Tallies = Mapping[str, tuple[float, float | None]]
# Columns of media, beside those of the data: a `Media` of the prompt for each response.
MEDIA_COLUMNS = ("images", "videos", "audios")
# Columns offered beside those of the data: each response also has its conversation.
CONVERSATIONS = "conversations"
OFFERED_COLUMNS = (*MEDIA_COLUMNS, CONVERSATIONS)
# Column offered where an environment is played: what it kept, for each response.
ENVIRONMENTS = "environments"


class RewardError(RuntimeError):
    """A reward could not be computed; the message names the function, the sample and the cause."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The reward of one response.

    Args:
        reward: Number to maximise.
        components: Parts of the reward by name, unweighted.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)


# In place of a reward that could not be decided: no failure of the function. Compared by identity.
UNDECIDED = RewardResult(math.nan, {"undecided": 1.0})
# Where a function returns None, as TRL's do for rows that others score. Compared by identity.
NOT_SCORED = RewardResult(0.0)


@dataclass(frozen=True, slots=True)
class KeptEnvironment:
    """An environment as it crosses processes.

    Args:
        class_name: Name of the author's class.
        attributes: `{"json": value}`, `{"pickle": base64}` or `{"error": text}` by name.
    """

    class_name: str = ""
    attributes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


class RewardFunction(Protocol):
    """Scorer of responses; holds processes, so it must be closed."""

    @property
    def name(self) -> str:
        """Name of the function and of its component."""
        ...

    @property
    def needs_labels(self) -> bool:
        """Return whether every row must have a label."""
        ...

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> Sequence[RewardResult | None]:
        """Return one result per response, in order; None for one that could not be decided.

        Only undecided responses are left out of the loss, whatever `--reward_failure` says: what a
        model writes must neither end a run nor earn a number that nobody computed.

        Args:
            prompts: Rendered prompts.
            responses: Decoded responses, without the prompt.
            labels: Reference answers.
            columns: Other columns of the data rows.

        Raises:
            RewardError: A reward could not be computed.
        """
        ...

    def close(self) -> None:
        """End the worker processes; may be called twice."""
        ...


@runtime_checkable
class CallStyle(Protocol):
    """The way to call a reward; one without these attributes is called in the trainer's thread.

    By default it gets one group of responses per call.

    Args:
        parallel_calls: Calls that it answers at once, each in a thread; 0: only in the trainer's
            thread.
        whole_batch: Whether it gets all responses of a rank in one call, in the trainer's thread.
    """

    parallel_calls: int
    whole_batch: bool


@runtime_checkable
class UsesEngine(Protocol):
    """A reward that asks the engine of the run, between batches and in the trainer's thread."""

    def use_engine(self, engine: "RolloutEngine") -> None:
        """Pass the engine, which is awake and samples nothing else."""
        ...


@runtime_checkable
class CountsCosts(Protocol):
    """A reward that reports its costs."""

    def take_tallies(self) -> Tallies:
        """Return sums since the last call; the same names on every rank."""
        ...


@runtime_checkable
class ChecksLabels(Protocol):
    """A reward that knows which labels it can use."""

    def label_problem(self, label: str | None) -> str | None:
        """Return why no response to a row with this label can be right; None if one can."""
        ...


@runtime_checkable
class TakesColumns(Protocol):
    """A reward function whose signature names columns of the data.

    Args:
        options: Values of `reward_args` that it takes.
        label_use: "labels" where it reads labels as such, "column" where it only names the label's
            column or takes everything, "" where it does not get the label.
    """

    options: Mapping[str, object]
    label_use: Literal["labels", "column", ""]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise a RewardError if a column that it needs is missing."""
        ...

    def try_out(self, prompts: Texts, labels: Labels, columns: Columns) -> None:
        """Raise a RewardError if it cannot score responses that are the labels."""
        ...


@runtime_checkable
class ReadsEnvironments(Protocol):
    """A reward that may read what environments kept at the end of their episodes.

    Args:
        reads_environments: Whether the column `environments` must be offered.
    """

    reads_environments: bool


@dataclass(frozen=True, slots=True)
class RewardRecipes:
    """Weights of rewards by the value that a row has in one column.

    Args:
        column: Column of the data rows.
        weights: Value of the column -> name of a reward -> its weight. A reward that is not named
            does not score these rows.
    """

    column: str
    weights: Mapping[str, Mapping[str, float]]

    def weights_of(self, value: object) -> Mapping[str, float]:
        """Return the weights of a row with this value.

        Raises:
            RewardError: No recipe has this value.
        """
        if not isinstance(value, str) or value not in self.weights:
            raise RewardError(
                f"no reward recipe for {value!r} in column {self.column!r}: known are "
                f"{', '.join(sorted(self.weights))}; add a table to --reward_recipe"
            )
        return self.weights[value]

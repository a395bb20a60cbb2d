"""Rollout sources: their interface, requests, samples and shared parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightrft.config import TrainConfig
from lightrft.datasets.prompt_sampler import GroupResult
from lightrft.datasets.types import Prompt
from lightrft.engines.media.text_encoder import TEXT_ENCODER, Encoder
from lightrft.engines.rows import request_seed
from lightrft.engines.types import SamplingParams
from lightrft.records.rollout import ScoredRollout
from lightrft.records.sample_ledger import SampleLedger
from lightrft.records.table import RowTable, episodes_of
from lightrft.rewards.types import RewardError, RewardFunction
from lightrft.rollout.ledger_records import Evidence
from lightrft.rollout.open_groups import NOTHING_OPEN, StreamState
from lightrft.strategy.distributed.deadlines import StepTimer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.rollout.model_rewards import ModelRewards
    from lightrft.strategy.distributed.context import DistributedContext
    from lightrft.strategy.engine.session import EngineSession


State = TypeVar("State")
# Prompt, request id, group id and index in the group of a sample.
SampleTask = tuple[Prompt, int, int, int]
# Counts of an agent's episode, for metrics.
AGENT_COUNTS = ("calls", "lost_calls", "branches", "malformed_calls", "restarts")


@dataclass(frozen=True, slots=True)
class SourceParts:
    """Parts of a run that its sources share.

    Args:
        session: Session of the engine, with its ranks and collectives.
        config: Options of the run.
        decoder: Decoder of sampled ids.
        reward_function: Function that scores responses.
        model_rewards: Reward models, or None.
        encoder: Encoder of prompts with media.
    """

    session: EngineSession
    config: TrainConfig
    decoder: PreTrainedTokenizerBase
    reward_function: RewardFunction
    model_rewards: ModelRewards | None = None
    encoder: Encoder = TEXT_ENCODER

    @property
    def context(self) -> DistributedContext:
        """Ranks and collectives."""
        return self.session.context


@dataclass(frozen=True, slots=True)
class SampleRequests:
    """Requests for `params.n` samples per prompt.

    Args:
        prompts: Prompts of this rank.
        positions: Positions among the step's prompts over all ranks; these are the group ids.
        num_prompts: Number of prompts over all ranks.
        params: Distribution and length of responses.
        first_request_id: Request id of position 0. Equal request ids and seeds give equal random
            numbers.
        shapes_rewards: Whether length changes the reward.
        is_recorded: Whether the engine records the samples in its ledger, for training.
        next_prompts: Function that returns this rank's part of a further batch of prompts; None if
            there are none.
        stream: State of the source, with unfinished responses of the previous round.
        most_groups: Number of groups that this and later steps train on. No more are begun, and
            `prompts` may be empty. None if the number is unknown.
        step, batch: Step of the run and batch in the step, for the journal; step None writes none.
        timer: Timer of the step.
        ledger: Ledger that records requests, answers and rewards.
    """

    prompts: Sequence[Prompt]
    positions: range
    num_prompts: int
    params: SamplingParams
    first_request_id: int = 0
    shapes_rewards: bool = True
    is_recorded: bool = True
    next_prompts: Callable[[], Sequence[Prompt]] | None = None
    stream: StreamState = NOTHING_OPEN
    most_groups: int | None = None
    step: int | None = None
    batch: int = 0
    timer: StepTimer = field(default_factory=StepTimer)
    ledger: SampleLedger = field(default_factory=SampleLedger)

    @property
    def request_ids(self) -> range:
        """Request id of each prompt."""
        first, positions = self.first_request_id, self.positions
        return range(first + positions.start, first + positions.stop, positions.step)

    def begin(self) -> list[SampleTask]:
        """Note in the ledger what is requested, and return it."""
        self.ledger.ask(self.prompts, self.positions, self.params.n, self.request_ids)
        groups = zip(self.prompts, self.request_ids, self.positions, strict=True)
        return [(*group, index) for group in groups for index in range(self.params.n)]

    def recording(self, parts: SourceParts) -> AbstractContextManager[None]:
        """Return a context in which the engine records its samples, for the ledger gate."""
        engine = parts.session.engine
        if engine is None or not (self.is_recorded and parts.config.ledger_gate):
            return nullcontext()
        return engine.ledger.recording()


@dataclass(frozen=True, slots=True)
class Selection:
    """Groups that a step trains on, and counts of the others.

    Args:
        rows: Rows of the table of all sampled groups to train on, ascending.
        is_filler: [len(rows)] bool, rows of constant groups that only keep the batch full; they
            are excluded from the loss.
        num_groups, num_constant, num_surplus: Number of groups, of constant groups, and of mixed
            groups beyond what the step needed.
        num_solved: Number of constant groups at the step's highest accuracy.
        num_scored: Number of sampled rows with a reward.
        num_sampled_tokens: Number of tokens sampled for all groups.
    """

    rows: NDArray[np.int64]
    is_filler: NDArray[np.bool_]
    num_groups: int
    num_constant: int
    num_surplus: int
    num_solved: int
    num_scored: int
    num_sampled_tokens: int

    @property
    def is_empty(self) -> bool:
        """Return whether every group is constant, so that there is nothing to train on."""
        return bool(self.is_filler.all())


@dataclass(frozen=True, slots=True)
class StreamReport:
    """Tokens and groups of streaming rollouts in a round, over all ranks.

    Args:
        num_sampled_tokens: Number of tokens sampled in this round.
        num_open: Number of groups that have begun and are not trained on.
        num_open_tokens: Number of their tokens.
        num_waited: Number of groups that were sampled to their end, beyond their budget.
    """

    num_sampled_tokens: int
    num_open: int
    num_open_tokens: int
    num_waited: int


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one or several batches of prompts.

    Args:
        scored: Rollouts of this rank.
        table: Rows of all ranks to train on.
        num_prompts: Number of prompts over all ranks.
        num_rounds: Number of batches of prompts.
        greedy: Greedy completions of all ranks, or None if the estimator needs none.
        selection: Report of dynamic sampling, or None.
        report: Report of streaming rollouts, or None.
        stream: State for the next round.
        evidence: Journal and ledger of this rank for the ledger gate, or None without it.
        tool_names: Names of the available tools, or None without environments and tools.
        agent_counts: Counts of calls and branches by name, for each agent episode of this rank;
            None without agents.
        groups: Outcome of each sampled group, for the prompt sampler; those that are not trained
            on are among them.
    """

    scored: Sequence[ScoredRollout]
    table: RowTable
    num_prompts: int
    num_rounds: int = 1
    greedy: RowTable | None = None
    selection: Selection | None = None
    report: StreamReport | None = None
    evidence: Evidence | None = None
    tool_names: tuple[str, ...] | None = None
    agent_counts: Sequence[Mapping[str, int]] | None = None
    stream: StreamState = NOTHING_OPEN
    groups: tuple[GroupResult, ...] = ()

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens sampled over all ranks, including groups that are left out."""
        for each in (self.report, self.selection):
            if each is not None:
                return each.num_sampled_tokens
        return int(self.table.sampled_lengths.sum())

    @property
    def is_undecided(self) -> bool:
        """Return whether no sample has a reward."""
        if self.selection is not None:
            return not self.selection.num_scored
        return bool(self.table.is_masked.all())

    @property
    def skip_reason(self) -> str | None:
        """Reason why there is nothing to train on, or None."""
        if self.is_undecided:
            return "the reward decided no sample"
        if self.selection is not None and self.selection.is_empty:
            return (
                f"in all {self.selection.num_groups} groups the responses are equally accurate; "
                "the prompts are solved or out of reach"
            )
        return None


def group_results(table: RowTable) -> tuple[GroupResult, ...]:
    """Return the outcomes of the groups in a table, in order; places are the prompts' ids."""
    first, results = episodes_of(table), []
    for group in np.unique(first.group_ids):
        rows = np.flatnonzero(first.group_ids == group)
        scored = rows[~first.is_masked[rows]]
        results.append(
            GroupResult(
                int(first["prompt_places"][rows[0]]),
                tuple(first.rewards[scored].tolist()),
                tuple(first.accuracies[scored].tolist()),
                tuple(first.sampled_lengths[rows].tolist()),
            )
        )
    return tuple(results)


def task_seeds(params: SamplingParams, request_id: int, index: int) -> dict[str, int]:
    """Return the seeds of one sample's task by their names.

    The samples of a group are compared with each other, so they share `seed`.
    """
    sample_id = request_id * params.n + index
    return {
        "seed": request_seed(params.seed, request_id, 0) % 2**31,
        "sample_seed": request_seed(params.seed, sample_id, 1) % 2**31,
    }


def agree(
    context: DistributedContext,
    problem: Exception | None,
    state: State,
    notes: Sequence[str] = (),
) -> list[State]:
    """Return the state of each rank; raise on all if one has a problem. Collective.

    Args:
        context: Ranks and collectives.
        problem: Error of this rank, or None.
        state: State of this rank.
        notes: Messages of this rank for the console.
    """
    text = None if problem is None else str(problem)
    everyone: list[tuple[State, str | None, Sequence[str]]]
    everyone = context.gather_objects((state, text, tuple(notes)))
    for line in dict.fromkeys(line for _, _, lines in everyone for line in lines):
        context.print(line)
    if problem is not None:
        raise problem
    for rank, (_, text, _) in enumerate(everyone):
        if text is not None:
            raise RewardError(f"rank {rank}: {text}")
    return [state for state, _, _ in everyone]


# Balance if a ledger is missing.
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class InFlight:
    """Rows that a step leaves to the next ones, on one rank.

    Args:
        num_requests: Number of requested prompts so far, over all ranks; the next request id.
        held: Samples of later steps (`rollout_lag`), the next step first.
        stream: State of streaming rollouts.
        balance: Sum over requested samples that are neither trained nor left out, over all ranks;
            or `UNKNOWN`.
    """

    num_requests: int = 0
    held: tuple[Samples, ...] = ()
    stream: StreamState = NOTHING_OPEN
    balance: int = 0

    def summary(self) -> str:
        """Return one line on the rows of this rank."""
        num_open = sum(group.begun > 0 for group in self.stream.groups)
        return f"of {len(self.held)} steps, and {num_open} open groups"


class RolloutSource(Protocol):
    """A source of samples: single turns, environments, streaming rollouts, an endpoint.

    A source is chosen once, in `lightrft.rollout.sampler.build_source`, and may wrap another one.
    Its state is a value: unfinished rows come with the requests, and the next state is returned
    with the samples. An abandoned step therefore leaves nothing behind and is sampled again with
    the same numbers.
    """

    def sample(self, requests: SampleRequests) -> Samples:
        """Return scored samples; collective. The engine stays awake."""
        ...


def own_positions(context: DistributedContext, num_total: int, *, first: int = 0) -> range:
    """Return the positions of this rank's prompts among all `num_total`, counted from `first`.

    A distributed sampler assigns consecutive prompts to consecutive ranks. The positions, and with
    them a prompt's random numbers, therefore do not depend on the number of ranks.
    """
    return range(first + context.rank, first + num_total, context.world_size)

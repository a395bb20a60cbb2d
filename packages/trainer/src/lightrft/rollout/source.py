"""Rollout sources: their interface, the requests, the samples, and the parts that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.media.media import TEXT_ENCODER, Encoder
from lightrft.engines.types import SamplingParams
from lightrft.records.rollout import ScoredRollout
from lightrft.records.sample_ledger import SampleLedger
from lightrft.records.table import RowTable
from lightrft.rewards.types import RewardFunction
from lightrft.rollout.ledger_records import Evidence
from lightrft.rollout.open_groups import NOTHING_OPEN, StreamState
from lightrft.strategy.distributed.deadlines import StepTimer

if TYPE_CHECKING:
    from lightrft.rollout.model_rewards import ModelRewards
    from lightrft.strategy.distributed.context import DistributedContext
    from lightrft.strategy.engine.session import EngineSession


# Of an episode of an agent, for metrics.
AGENT_COUNTS = ("calls", "lost_calls", "branches", "malformed_calls", "restarts")


class Decoder(Protocol):
    """The part of a tokenizer that turns sampled ids into text."""

    pad_token_id: int | None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of the ids."""
        ...


@dataclass(frozen=True, slots=True)
class SourceParts:
    """Parts of a run that its sources share.

    Args:
        session: Generates, with ranks and collectives of its own.
        config: Options of the run.
        decoder: Turns sampled ids into text.
        reward_function: Scores responses.
        model_rewards: Reward models, or None.
        encoder: Of prompts with media.
    """

    session: EngineSession
    config: TrainConfig
    decoder: Decoder
    reward_function: RewardFunction
    model_rewards: ModelRewards | None = None
    encoder: Encoder = TEXT_ENCODER

    @property
    def context(self) -> DistributedContext:
        """Ranks and collectives."""
        return self.session.context


@dataclass(frozen=True, slots=True)
class SampleRequests:
    """Requests for `params.n` samples of each of some prompts.

    Args:
        prompts: This rank's.
        positions: Place of each among the prompts of all ranks in the step; its group id.
        num_prompts: Prompts of all ranks.
        params: Distribution and length of responses.
        first_request_id: Of position 0. Prompts that are rolled out with the same id and seed get
            the same random numbers.
        shapes_rewards: Length changes the reward.
        is_recorded: The engine writes the samples into its ledger: they are trained on.
        next_prompts: This rank's part of a further batch of prompts; None if there are none.
        stream: State of the source: responses that the round before left unfinished.
        most_groups: Groups that this step and those to come train on: no more are begun, and there
            may be no prompts; None is not known.
        step, batch: Of the run and within the step, for the journal; step None writes none.
        timer: Measures the step.
        ledger: Receives what is asked, answered and scored.
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
        """Of each prompt."""
        first, own = self.first_request_id, self.positions
        return range(first + own.start, first + own.stop, own.step)

    def recording(self, parts: SourceParts) -> AbstractContextManager[None]:
        """Has the engine write down what it samples, for the ledger gate."""
        engine = parts.session.engine
        if engine is None or not (self.is_recorded and parts.config.ledger_gate):
            return nullcontext()
        return engine.ledger.recording()


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups a step trains on, and what became of the others.

    Args:
        rows: Rows of the table of all sampled groups to train on, ascending.
        is_filler: [len(rows)] bool, rows of constant groups that only keep the batch full; they
            are excluded from the loss.
        num_groups, num_constant, num_surplus: Groups sampled, constant among them, and mixed ones
            beyond what the step needed.
        num_solved: Constant groups at the highest accuracy that any response of the step reached.
        num_scored: Sampled rows with a reward.
        num_sampled_tokens: Tokens sampled for all groups.
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
        """Whether every group is constant, so that there is nothing to train on."""
        return bool(self.is_filler.all())


@dataclass(frozen=True, slots=True)
class StreamReport:
    """Tokens and groups of streaming rollouts in a round, over all ranks.

    Args:
        num_sampled_tokens: In this round.
        num_open: Groups that have begun and are not trained on.
        num_open_tokens: Tokens that they have.
        num_waited: Groups that were sampled to their end, beyond their budget.
    """

    num_sampled_tokens: int
    num_open: int
    num_open_tokens: int
    num_waited: int


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one or several batches of prompts.

    Args:
        scored: This rank's own rollouts.
        table: The rows of all ranks that are trained on.
        num_prompts: Prompts that were rolled out, over all ranks.
        num_rounds: Batches of prompts among them.
        greedy: The greedy completions of all ranks, or None where the estimator needs none.
        selection: Report of dynamic sampling, or None.
        report: Of streaming rollouts, or None.
        stream: State that they leave to the next round.
        evidence: Journal and ledger of this rank for the ledger gate, or None without it.
        tool_names: Of the tools that could be called, or None without environments and tools.
        agent_counts: Of each of this rank's episodes of agents, its calls and branches, by name;
            None without agents.
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

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that were sampled for them over all ranks, those of groups that are left out."""
        for each in (self.report, self.selection):
            if each is not None:
                return each.num_sampled_tokens
        return int(self.table.sampled_lengths.sum())

    @property
    def is_undecided(self) -> bool:
        """Whether the reward decided none of what was sampled."""
        if self.selection is not None:
            return not self.selection.num_scored
        return bool(self.table.is_masked.all())

    @property
    def why_idle(self) -> str | None:
        """Why there is nothing to train on; None if there is something."""
        if self.is_undecided:
            return "the reward decided no sample"
        if self.selection is not None and self.selection.is_empty:
            return (
                f"in all {self.selection.num_groups} groups the responses are equally accurate; "
                "the prompts are solved or out of reach"
            )
        return None


# Of a balance, where a ledger is missing.
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class InFlight:
    """Rows that a step leaves to the next ones, on one rank.

    Args:
        num_requests: Prompts asked for so far, over all ranks; the id of the next request.
        held: Samples of the steps to come (`rollout_lag`), the next one first.
        stream: Of streaming rollouts.
        balance: Sum over the samples that were asked for and are neither trained nor left out,
            over all ranks; or `UNKNOWN`.
    """

    num_requests: int = 0
    held: tuple[Samples, ...] = ()
    stream: StreamState = NOTHING_OPEN
    balance: int = 0

    def summary(self) -> str:
        """One line on the rows of this rank."""
        num_open = sum(group.begun > 0 for group in self.stream.groups)
        return f"of {len(self.held)} steps, and {num_open} open groups"


class RolloutSource(Protocol):
    """A source of samples: single turns, environments, streaming rollouts, an endpoint.

    A source is chosen once, in `lightrft.rollout.sampler.build_source`, and may wrap another one.
    Rows that go on in a later step are its state, a value: it comes with the requests and the next
    one goes out with the samples, so that a step which is given up
    leaves nothing behind and is sampled again with the same numbers.
    """

    def sample(self, requests: SampleRequests) -> Samples:
        """Scored samples; collective. The engine stays awake."""
        ...


def own_positions(context: DistributedContext, num_total: int, *, first: int = 0) -> range:
    """Positions of this rank's prompts among `num_total` of all ranks, counted from `first`.

    A distributed sampler gives consecutive prompts to consecutive ranks, so the positions (and
    with them the random numbers of a prompt) do not depend on the number of ranks.
    """
    return range(first + context.rank, first + num_total, context.world_size)

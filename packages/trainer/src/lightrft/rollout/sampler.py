"""Samples of a step or an evaluation, from the source that the options name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lightrft.config import ConfigError, SamplingOptions
from lightrft.datasets.batch_stream import check_lengths
from lightrft.datasets.types import Prompt
from lightrft.engines.types import SamplingParams
from lightrft.records.rollout import ScoredRollout
from lightrft.records.table import BRANCH_STEP, RowTable, episodes_of
from lightrft.rollout.open_groups import NOTHING_OPEN, StreamState
from lightrft.rollout.scoring import require_rewards
from lightrft.rollout.single_turn import SingleTurnSource, turn_source
from lightrft.rollout.source import (
    UNKNOWN,
    InFlight,
    RolloutSource,
    SampleRequests,
    Samples,
    SourceParts,
    group_results,
    own_positions,
)
from lightrft.strategy.distributed.deadlines import StepTimer

if TYPE_CHECKING:
    from lightrft.datasets.media import Modality
    from lightrft.rollout.environments.open_episodes import OpenEpisodes

# Function that makes the source of responses to a batch of prompts.
MakeSource = Callable[[SourceParts], RolloutSource]


def training_params(config: SamplingOptions) -> SamplingParams:
    """Return the distribution and length of responses in training."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_tokens=config.generate_max_len,
        n=config.n_samples_per_prompt,
        stop=config.stop,
        seed=config.seed,
        records_support=config.truncates,
        records_routes=config.routing_replay == "auto",
    )


def greedy_params(config: SamplingOptions) -> SamplingParams:
    """Return parameters of one greedy completion, with the stops of training."""
    return replace(training_params(config), temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, n=1)


class GreedySource:
    """Source that adds a greedy completion of each prompt to the samples of another source.

    Groups whose greedy completion has no reward lack a baseline and are excluded.

    Args:
        source: Source of samples and greedy completions.
        config: Options with the stops and lengths of the greedy completions.
    """

    def __init__(self, source: RolloutSource, config: SamplingOptions) -> None:
        self._source, self._config = source, config

    def sample(self, requests: SampleRequests) -> Samples:
        """Sample greedy completions, then the samples."""
        greedy = replace(
            requests,
            params=greedy_params(self._config),
            is_recorded=False,
            step=None,
            ledger=requests.ledger.greedy,
        )
        best = self._source.sample(greedy).table
        samples = self._source.sample(requests)
        without = best.group_ids[best.is_masked]
        requests.ledger.lack_baselines(without)
        has_none = np.isin(samples.table.group_ids, without)
        table = replace(samples.table, is_masked=samples.table.is_masked | has_none)
        return replace(samples, table=table, greedy=best)


def single_turns(parts: SourceParts) -> SingleTurnSource:
    """Return the source of single-turn responses."""
    return turn_source(parts.config.use_fire)(parts)


class SingleTurns:
    """Parts of a run without environments and tools, where each response is one turn.

    Args:
        modality: Renderer and encoder of prompts.
    """

    answers_calls = False
    notes = ()

    def __init__(self, modality: Modality) -> None:
        self.encoder = modality.encoder
        self.prompt_tokenizer = modality.renderer

    # The same interface as `Environments.source`.
    source = staticmethod(single_turns)

    def close(self) -> None:
        """Do nothing, since there are no workers."""


def build_source(
    parts: SourceParts, batches: RolloutSource, *, needs_greedy: bool
) -> RolloutSource:
    """Return the source of samples for the steps of a run.

    Args:
        parts: Parts of the run.
        batches: Source of responses to one batch of prompts.
        needs_greedy: Whether every step also samples greedy completions.
    """
    source = GreedySource(batches, parts.config) if needs_greedy else batches
    if parts.config.stream_chunk is not None:
        from lightrft.rollout.streaming import StreamSource

        source = StreamSource(parts, _open_episodes(batches) if parts.config.has_episodes else None)
    if parts.config.dynamic_sampling:
        from lightrft.rollout.dynamic import DynamicSource

        return DynamicSource(source, parts)
    return source


def _open_episodes(batches: RolloutSource) -> OpenEpisodes:
    """Return operations that play a source's episodes over several steps.

    Raises:
        TypeError: The source has no episodes that can be resumed.
    """
    from lightrft.rollout.environments.environments import EpisodeSource
    from lightrft.rollout.environments.open_episodes import OpenEpisodes

    if not isinstance(batches, EpisodeSource):
        raise TypeError(f"stream_chunk plays no episodes of a {type(batches).__name__}")
    return OpenEpisodes(batches)


class RolloutSampler:
    """Sampler over all ranks, with rewards, for training and evaluation.

    Args:
        parts: Parts of the run.
        make_source: Function that makes the source of responses to a batch of prompts, for
            example `Environments.source`.
        needs_greedy: Whether every step also samples greedy completions.
    """

    def __init__(
        self,
        parts: SourceParts,
        make_source: MakeSource = single_turns,
        *,
        needs_greedy: bool = False,
    ) -> None:
        self._parts = parts
        self._batches = make_source(parts)
        self._source = build_source(parts, self._batches, needs_greedy=needs_greedy)

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        first_request_id: int,
        timer: StepTimer,
        next_prompts: Callable[[], Sequence[Prompt]] | None = None,
        stream: StreamState = NOTHING_OPEN,
        most_groups: int | None = None,
        step: int | None = None,
    ) -> Samples:
        """Return all samples of one step; collective.

        Args:
            prompts: This rank's prompts; every rank passes equally many.
            first_request_id: Request id of the first prompt of the step over all ranks.
            timer: Timer of the step.
            next_prompts: Function that returns further prompts of this rank, for dynamic sampling
                and streaming rollouts; None if there are none.
            stream: State that the previous round left to the source.
            most_groups: Limit on new groups, as in `SampleRequests`.
            step: Step of the run, for the journal; None writes no journal.

        Raises:
            ConfigError: There are open responses, but rollouts do not stream.
        """
        engine, context = self._parts.session.engine, self._parts.context
        if stream.num_groups and self._parts.config.stream_chunk is None:
            raise ConfigError(
                f"the checkpoint has the open responses to {stream.num_groups} prompts: give "
                "stream_chunk as before, or another --output_dir to start anew"
            )
        if engine is not None:
            engine.ledger.take()  # discard entries of an abandoned step
        num_prompts = len(prompts) * context.world_size
        if most_groups is not None:
            num_prompts = self._parts.config.rollout_batch_size
        samples = self._source.sample(
            SampleRequests(
                prompts,
                own_positions(context, num_prompts),
                num_prompts,
                training_params(self._parts.config),
                first_request_id,
                next_prompts=next_prompts,
                stream=stream,
                most_groups=most_groups,
                step=step,
                timer=timer,
            )
        )
        if samples.selection is None:  # otherwise they were checked before the selection
            require_rewards(samples.table, samples.greedy)
            samples = replace(samples, groups=group_results(samples.table))
        if self._parts.config.rollout_lag and self._parts.config.ledger_gate:
            from lightrft.rollout.version_checks import check_fresh_row

            check_fresh_row(samples, self._parts)
        return samples

    def fill_queue(
        self,
        flight: InFlight,
        steps: range,
        *,
        draw: Callable[[], Sequence[Prompt]],
        next_prompts: Callable[[], Sequence[Prompt]] | None,
        timer: StepTimer,
        num_planned: int,
    ) -> tuple[InFlight, list[Samples]]:
        """Sample some further steps; return the rows in flight with theirs, and these; collective.

        Streaming rollouts start no group that no step would train on: the groups still open at the
        end would be the long ones. With dynamic sampling the number of further groups is unknown.

        Args:
            flight: Rows in flight before.
            steps: Numbers of the steps.
            draw: Returns this rank's prompts of a step.
            next_prompts: Returns further prompts for dynamic sampling and streaming, or None.
            timer: Measures the durations.
            num_planned: Steps of the whole run; 0 is unknown.
        """
        config, drawn = self._parts.config, list[Samples]()
        size = config.rollout_batch_size
        is_known = bool(config.stream_chunk and num_planned) and not config.dynamic_sampling
        for number in steps:
            most = (num_planned - number + 1) * size if is_known else None
            num_open = flight.stream.num_groups
            has_all = most is not None and num_open >= size and num_open + size > most
            prompts = () if has_all else draw()
            check_lengths(prompts, config.prompt_max_len)
            samples = self.collect(
                prompts,
                first_request_id=flight.num_requests,
                timer=timer,
                next_prompts=next_prompts,
                stream=flight.stream,
                most_groups=most,
                step=number,
            )
            drawn.append(replace(samples, stream=NOTHING_OPEN))
            flight = InFlight(
                flight.num_requests + samples.num_prompts,
                (*flight.held, drawn[-1]),
                samples.stream,
                UNKNOWN,
            )
        return flight, drawn

    def pop_step(
        self, before: InFlight, flight: InFlight, drawn: Sequence[Samples]
    ) -> tuple[Samples, InFlight]:
        """Return the samples that a step trains on, and the rows that stay in flight; collective.

        Args:
            before: Rows in flight before the step.
            flight: Rows in flight with those of this step.
            drawn: Samples of this step.

        Raises:
            LedgerError: Samples would be trained twice, or are lost.
        """
        config, context = self._parts.config, self._parts.context
        trained, left = flight.held[0], replace(flight, held=flight.held[1:], balance=UNKNOWN)
        if not config.keeps_rows:
            return trained, left
        from lightrft.rollout.in_flight import check_balance

        size = config.n_samples_per_prompt
        balance = check_balance(before, left, drawn, trained, group_size=size, context=context)
        return trained, replace(left, balance=balance)

    def sample_all(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> tuple[Sequence[ScoredRollout], RowTable]:
        """Complete all prompts and score them, for an evaluation; collective.

        Rank r of W completes the prompts r, r + W, ...; ranks may have unequal numbers or none. The
        length of a response does not change its reward.

        Args:
            prompts: All prompts, the same list on every rank.
            params: Parameters with n completions per prompt.

        Returns:
            Samples of this rank, and a table that is equal on all ranks. Group i holds the n rows
            of prompt i. An episode with branches is represented by its first row.
        """
        positions = own_positions(self._parts.context, len(prompts))
        local_prompts = [prompts[position] for position in positions]
        samples = self._batches.sample(
            SampleRequests(
                local_prompts,
                positions,
                len(prompts),
                params,
                shapes_rewards=False,
                is_recorded=False,
            )
        )
        scored = [item for item in samples.scored if item.rollout.sample_id < BRANCH_STEP]
        return scored, episodes_of(samples.table)

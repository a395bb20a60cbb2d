"""Samples of one step and of an evaluation, from the source that the options name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lightrft.config import ConfigError, SamplingOptions
from lightrft.datasets.types import Prompt
from lightrft.engines.types import SamplingParams
from lightrft.records.rollout import ScoredRollout
from lightrft.records.table import BRANCH_STEP, RowTable, episodes_of
from lightrft.rollout.open_groups import NOTHING_OPEN, StreamState
from lightrft.rollout.scoring import require_rewards
from lightrft.rollout.single_turn import SingleTurnSource, turn_source
from lightrft.rollout.source import (
    RolloutSource,
    SampleRequests,
    Samples,
    SourceParts,
    own_positions,
)
from lightrft.strategy.distributed.deadlines import StepTimer

if TYPE_CHECKING:
    from lightrft.datasets.media import Modality
    from lightrft.rollout.environments.open_episodes import OpenEpisodes

# Makes the source of the responses to a batch of prompts.
MakeSource = Callable[[SourceParts], RolloutSource]


def training_params(config: SamplingOptions) -> SamplingParams:
    """Distribution and length of the responses of training."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_tokens=config.generate_max_len,
        n=config.n_samples_per_prompt,
        stop=config.stop,
        seed=config.seed,
    )


def greedy_params(config: SamplingOptions) -> SamplingParams:
    """One completion by the most likely token at every position, under the stops of training."""
    return replace(training_params(config), temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, n=1)


class GreedySource:
    """Samples of another source, and a greedy completion of each prompt beside them.

    Groups whose greedy completion has no reward have no baseline: they are excluded.

    Args:
        source: Of both.
        config: Stops and lengths of the greedy completions.
    """

    def __init__(self, source: RolloutSource, config: SamplingOptions) -> None:
        self._source, self._config = source, config

    def sample(self, requests: SampleRequests) -> Samples:
        """See `RolloutSource`."""
        greedy = replace(
            requests,
            params=greedy_params(self._config),
            is_recorded=False,
            step=None,
            ledger=requests.ledger.greedy,
        )
        best = self._source.sample(greedy).table
        found = self._source.sample(requests)
        without = best.group_ids[best.is_masked]
        requests.ledger.lack_baselines(without)
        has_none = np.isin(found.table.group_ids, without)
        table = replace(found.table, is_masked=found.table.is_masked | has_none)
        return replace(found, table=table, greedy=best)


def single_turns(parts: SourceParts) -> SingleTurnSource:
    """The source of responses of one turn."""
    return turn_source(parts.config)(parts)


class SingleTurns:
    """A run without environments and tools: each response is one turn.

    Args:
        modality: Renders and encodes prompts.
    """

    answers_calls = False
    notes = ()

    def __init__(self, modality: Modality) -> None:
        self.encoder = modality.encoder
        self.prompt_tokenizer = modality.renderer

    # See `Environments.source`.
    source = staticmethod(single_turns)

    def close(self) -> None:
        """Nothing: there are no workers."""


def build_source(
    parts: SourceParts, batches: RolloutSource, *, needs_greedy: bool
) -> RolloutSource:
    """The source of the steps of a run.

    Args:
        parts: Of the run.
        batches: Source of the responses to one batch of prompts.
        needs_greedy: Every step samples greedy completions, too.
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
    """Plays the episodes of a source over several steps.

    Raises:
        TypeError: The source plays none that can be brought back.
    """
    from lightrft.rollout.environments.environments import EpisodeSource
    from lightrft.rollout.environments.open_episodes import OpenEpisodes

    if not isinstance(batches, EpisodeSource):
        raise TypeError(f"stream_chunk plays no episodes of a {type(batches).__name__}")
    return OpenEpisodes(batches.work)


class RolloutSampler:
    """Samples over all ranks, scored, for training and for evaluation.

    Args:
        parts: Of the run.
        make_source: Makes the source of the responses to a batch of prompts, for example
            `Environments.source`.
        needs_greedy: Every step samples greedy completions, too.
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
        """All samples of one step; collective.

        Args:
            prompts: This rank's prompts; every rank passes equally many.
            first_request_id: Request id of the first prompt of the step over all ranks.
            timer: Measures the step.
            next_prompts: This rank's part of further prompts, for dynamic sampling and streaming
                rollouts; None if there are none.
            stream: State that the round before left to the source.
            most_groups: See `SampleRequests`.
            step: Of the run, for the journal of environments; None writes none.

        Raises:
            ConfigError: Responses are open, and nothing streams.
        """
        engine, context = self._parts.session.engine, self._parts.context
        if stream.num_groups and self._parts.config.stream_chunk is None:
            raise ConfigError(
                f"the checkpoint has the open responses to {stream.num_groups} prompts: give "
                "stream_chunk as before, or another --output_dir to start anew"
            )
        if engine is not None:
            engine.ledger.take()  # of a step that was given up
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
        if samples.selection is None:  # else they were required before it
            require_rewards(samples.table, samples.greedy)
        if self._parts.config.rollout_lag and self._parts.config.ledger_gate:
            from lightrft.rollout.version_checks import check_fresh_row

            check_fresh_row(samples, self._parts)
        return samples

    def sample_all(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> tuple[Sequence[ScoredRollout], RowTable]:
        """Completions of all prompts with their rewards, for an evaluation; collective.

        Rank r of W completes the prompts r, r + W, ...; ranks may have unequally many or none. The
        length of a response does not change its reward.

        Args:
            prompts: All prompts, the same list on every rank.
            params: With n completions of each prompt.

        Returns:
            This rank's own, and the same table on every rank; group i holds the n rows of prompt
            i. Of an episode with branches it is the first row.
        """
        positions = own_positions(self._parts.context, len(prompts))
        own = [prompts[position] for position in positions]
        samples = self._batches.sample(
            SampleRequests(
                own,
                positions,
                len(prompts),
                params,
                shapes_rewards=False,
                is_recorded=False,
            )
        )
        scored = [item for item in samples.scored if item.rollout.sample_id < BRANCH_STEP]
        return scored, episodes_of(samples.table)

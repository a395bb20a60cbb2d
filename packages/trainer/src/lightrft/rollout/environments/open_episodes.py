"""Open episodes: they sample further turns in each round; their environments stay in the workers.

An open episode samples as many tokens as its group may have, over any number of turns. Its calls
are answered in between and waited for. A turn that is cut goes on in the next round. With
`tool_lag` an episode has at most one whole turn per round. Its calls, or its reward, then overlap
with other episodes, and are waited for `tool_lag` rounds later, so timing changes nothing.
Between rounds an episode is a value, `OpenSample`. If its environment does not match this value,
it is restored: reset with the same seeds, and all calls repeated. If an answer differs, the
episode starts over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion, FinishReason, SamplingParams
from lightrft.records.rollout import Rollout
from lightrft.records.sample_ledger import ENVIRONMENT, SampleEntry, SampleLedger
from lightrft.rewards.types import KeptEnvironment, RewardResult
from lightrft.rollout.environments.environments import EpisodeSource
from lightrft.rollout.environments.episode import Episode, OtherAnswerError
from lightrft.rollout.environments.episode_batch import ChangedAnswerError, EpisodeBatch
from lightrft.rollout.environments.journal import Journal
from lightrft.rollout.environments.pool import Host
from lightrft.rollout.open_groups import EpisodeState, OpenGroup, OpenSample
from lightrft.rollout.source import SampleRequests
from lightrft.rollout.streaming import Place, ResponsePart

if TYPE_CHECKING:
    from lightrft.engines.media.sources import ImageSource

# Episodes of an evaluation, in the same workers, have smaller numbers.
_FIRST_NUMBER = 2**32


class OpenEpisodes:
    """Open responses that are episodes; see `OpenResponses`.

    Args:
        source: Source of the episodes of the run.
    """

    def __init__(self, source: EpisodeSource) -> None:
        self._source = source
        self.special_ids = source.environments.special_ids
        self.tool_names: tuple[str, ...] | None = source.environments.specs.tool_names
        # Episodes whose environments are in workers, by sample id.
        self._hosted: dict[int, Episode] = {}
        self._ledger = SampleLedger()

    def begin(self, sample_id: int) -> OpenSample:
        """Return an episode without turns."""
        return OpenSample(episode=EpisodeState(sample_id))

    def extended(
        self, groups: Sequence[OpenGroup], places: Sequence[Place], part: ResponsePart
    ) -> list[OpenSample]:
        """Sample a further part of some episodes.

        Raises:
            RewardError: An environment failed on some rank, and failures are not masked.
        """
        self._forget_others(groups)
        episodes = list[Episode]()
        batch = self._source.batch(
            episodes, part.params, journal=Journal(None, {}), ledger=self._ledger
        )
        numbers = self._free_numbers()
        for group, index in places:
            episode = self._resume(batch, group, index, numbers)
            episode.max_sampled = self._most(episode, part.lengths[group.request_id])
            episodes.append(episode)
        self._host(batch, [group.prompt for group, _ in places])
        while batch.is_open_anywhere():
            self._round(batch, part.round_number + self._source.parts.config.tool_lag)
        ended = batch.of([e for e in episodes if not e.is_open and not e.is_late])
        ended.keep()
        ended.finish()
        return list(map(self._snapshot, episodes))

    def finished(
        self, group: OpenGroup, group_id: int, requests: SampleRequests
    ) -> tuple[list[Rollout], list[RewardResult | None]]:
        """Return a group that has ended, and the rewards of its environments."""
        rollouts = list[Rollout]()
        for index, sample in enumerate(group.samples):
            episode = self._episode(group, index, requests.params, group_id)
            rollouts.append(episode.as_rollout())
            entry = requests.ledger.of(episode.sample_id)
            _note(entry, episode.prompt, sample)
            if self._source.parts.config.ledger_gate:
                self._source.turns.check_observations(rollouts[-1], entry)
        return rollouts, [_state(sample).reward for sample in group.samples]

    def _forget_others(self, groups: Sequence[OpenGroup]) -> None:
        """End environments of episodes in no group, whose step was abandoned."""
        known = {g.request_id * len(g.samples) + i for g in groups for i in range(len(g.samples))}
        lost = [self._forget(each) for each in self._hosted.keys() - known]
        for episode in lost:
            episode.settle()
        wait([self._source.pool.forget(episode.number) for episode in lost])

    def _forget(self, sample_id: int) -> Episode:
        self._ledger.entries.pop(sample_id)
        return self._hosted.pop(sample_id)

    def _free_numbers(self) -> Iterator[int]:
        """Yield the smallest free numbers, so that workers have equally many episodes."""
        taken = {each.number for each in self._hosted.values()}
        return (number for number in count(_FIRST_NUMBER) if number not in taken)

    def _most(self, episode: Episode, length: int | None) -> int | None:
        """Return an episode's token limit after a part; waiting saves none for later."""
        config = self._source.parts.config
        if length is None or config.stream_chunk is None or not config.tool_lag:
            return length
        return min(length, episode.num_sampled + config.stream_chunk)

    def _resume(
        self, batch: EpisodeBatch, group: OpenGroup, index: int, numbers: Iterator[int]
    ) -> Episode:
        """Return an episode that goes on, with its environment if that matches."""
        sample, sample_id = group.samples[index], group.request_id * len(group.samples) + index
        hosted = self._hosted.get(sample_id)
        if hosted is not None and hosted.value is sample:
            episode, hosted.is_late = hosted, False
        else:
            episode = self._episode(group, index, batch.params, group.request_id)
            self._hosted[sample_id] = episode
            self._ledger.entries[sample_id] = SampleEntry(answers=_answers(sample))
            if hosted is None:
                episode.number = next(numbers)
            else:
                hosted.settle()
                episode.number = hosted.number
            episode.generation = -1 if episode.segments else 0
        # If this part is abandoned, the environment's state is unknown.
        episode.value = None
        return episode

    def _episode(
        self, group: OpenGroup, index: int, params: SamplingParams, group_id: int
    ) -> Episode:
        """Return an episode as a part has left it."""
        sample = group.samples[index]
        state = _state(sample)
        task = group.prompt, group.request_id, group_id, index
        episode = self._source.new_episode(task, params)
        episode.request_id, episode.num_restarts = state.request_id, state.num_restarts
        episode.num_forgotten = state.num_forgotten
        episode.reset_message = state.message
        episode.reset_parts = () if state.message is None else (state.message,)
        if state.prompt_ids:
            episode.prompt = replace(
                group.prompt,
                text=state.prompt_text,
                token_ids=state.prompt_ids,
                messages=state.messages,
            )
        episode.token_ids, episode.logprobs = list(sample.token_ids), list(sample.logprobs)
        episode.sampled, episode.versions = list(state.sampled), list(sample.versions)
        episode.facts, episode.segments = sample.facts, list(sample.segments)
        episode.turn_texts = list(state.turns)
        episode.kept = KeptEnvironment(*json.loads(state.kept)) if state.kept else None
        episode.answers = [list(turn) for turn in state.answers]
        episode.is_open, episode.is_cut = sample.finish_reason is None, state.is_cut
        if sample.segments:
            episode.last = _last_turn(episode.prompt, group, sample)
        return episode

    def _host(self, batch: EpisodeBatch, prompts: Sequence[Prompt]) -> None:
        """Restore environments that do not match, and begin new episodes.

        Args:
            batch: Episodes that go on.
            prompts: Prompt of each, without the message of `reset`.
        """
        waiting = [e for e in batch.episodes if e.work is None]
        away = [e for e in waiting if e.segments and e.generation < 0]
        batch.each(away, self._bring_back)
        # Their last turns are complete, and not yet parsed for calls.
        unanswered = [
            e for e in waiting if e.is_open and not e.is_cut and len(e.answers) < e.num_turns
        ]
        for episode in unanswered:
            batch.parse_turn(episode)
        batch.each(unanswered, batch.after_turn)
        new = []
        for episode, prompt in zip(batch.episodes, prompts, strict=True):
            if not episode.segments and episode.is_open:
                # Also if it starts over: the new message of `reset` counts.
                episode.prompt, episode.generation = prompt, 0
                new.append(episode)
        batch.of(new).reset()
        for episode in new:
            if episode.no_room is not None:
                batch.failed(episode, episode.no_room)

    def _bring_back(self, episode: Episode, host: Host) -> None:
        try:
            episode.host_on(host)
        except OtherAnswerError as error:
            raise ChangedAnswerError(str(error)) from error

    def _round(self, batch: EpisodeBatch, due: int) -> None:
        """Sample a turn, or part of one, per episode, and answer its calls; collective.

        Args:
            batch: Episodes that go on.
            due: Round in which late episodes go on.
        """
        going = [episode for episode in batch.episodes if episode.may_sample]
        batch.sample(going, partial(self._take, batch, due))
        batch.collect()

    def _take(
        self, batch: EpisodeBatch, due: int, episode: Episode, completion: Completion
    ) -> None:
        """Append what was sampled, and start the environment's work on a whole turn."""
        batch.append(episode, completion)
        if episode.is_cut:
            return
        episode.is_late = self._source.parts.config.tool_lag > 0 and episode.max_sampled is not None
        if episode.is_late:
            episode.value = _value_of(episode, self._ledger.of(episode.sample_id), due)
        batch.parse_turn(episode)
        if episode.is_open or episode.is_late:
            batch.begin([episode], batch.after_turn)

    def _snapshot(self, episode: Episode) -> OpenSample:
        """Return an episode as a part leaves it."""
        if episode.value is None:
            episode.value = _value_of(episode, self._ledger.of(episode.sample_id))
            if not episode.is_open:
                self._forget(episode.sample_id)
        return episode.value


def _value_of(episode: Episode, entry: SampleEntry, due: int = 0) -> OpenSample:
    """Return an episode as a value."""
    last, kept = episode.last, episode.kept
    noted = (entry.answers.get(turn, []) for turn in range(len(episode.answers)))
    reason: FinishReason = "abort" if last is None else last.finish_reason
    state = EpisodeState(
        request_id=episode.request_id,
        message=episode.reset_message,
        prompt_text=episode.prompt.text,
        prompt_ids=episode.prompt.token_ids,
        messages=episode.prompt.messages,
        sampled=tuple(episode.sampled),
        turns=tuple(episode.turn_texts),
        answers=tuple(map(tuple, episode.answers)),
        noted=tuple(tuple(tuple(map(str, shown)) for shown in turn) for turn in noted),
        num_last=0 if last is None else len(last.output_token_ids),
        last_reason=reason,
        is_cut=episode.is_cut,
        due=due,
        has_failed=episode.failure is not None,
        num_restarts=episode.num_restarts,
        num_forgotten=episode.num_forgotten,
        reward=episode.result,
        scored=tuple(sorted(entry.scored)),
        kept="" if kept is None else json.dumps([kept.class_name, dict(kept.attributes)]),
    )
    return OpenSample(
        tuple(episode.token_ids),
        tuple(episode.logprobs),
        tuple(episode.versions),
        None if episode.is_open else reason,
        tuple(episode.segments),
        episode.facts,
        state,
    )


def _state(sample: OpenSample) -> EpisodeState:
    if sample.episode is None:
        raise ValueError("the rows in flight are responses of one turn: start without environment")
    return sample.episode


def _answers(sample: OpenSample) -> dict[int, list[tuple[str | ImageSource, ...]]]:
    """Return the shown answers, turn by turn, as ledgers have them."""
    return {turn: list(shown) for turn, shown in enumerate(_state(sample).noted)}


def _last_turn(prompt: Prompt, group: OpenGroup, sample: OpenSample) -> Completion:
    """Return the last turn so far."""
    state, segment = _state(sample), sample.segments[-1]
    stop = len(sample.token_ids) - len(segment.observation)
    start = stop - state.num_last
    return Completion(
        segment.request_id,
        segment.sample_index,
        (*prompt.token_ids, *sample.token_ids[:start]),
        sample.token_ids[start:stop],
        sample.logprobs[start:stop],
        group.logprobs_mode,
        state.last_reason,
        sample.versions[stop - 1],
    )


def _note(entry: SampleEntry, prompt: Prompt, sample: OpenSample) -> None:
    """Add what earlier steps recorded of an episode."""
    state = _state(sample)
    entry.prompt, entry.answers = prompt, _answers(sample)
    entry.has_failed |= state.has_failed
    if state.reward is not None:
        entry.reward_is(ENVIRONMENT, state.reward)
        entry.scored.update(state.scored)

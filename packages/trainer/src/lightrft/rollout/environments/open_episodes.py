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
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from lightrft.datasets.types import Prompt
from lightrft.engines.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from lightrft.records.rollout import Rollout
from lightrft.records.sample_ledger import ENVIRONMENT, SampleEntry, SampleLedger
from lightrft.rewards.types import KeptEnvironment, RewardResult
from lightrft.rollout.environments.episode import Episode, OtherAnswerError
from lightrft.rollout.environments.episode_batch import ChangedAnswerError, EpisodeBatch
from lightrft.rollout.environments.episode_work import EpisodeWork
from lightrft.rollout.environments.journal import Journal
from lightrft.rollout.environments.pool import Host
from lightrft.rollout.open_groups import EpisodeState, OpenGroup, OpenSample
from lightrft.rollout.open_turns import ResponsePart
from lightrft.rollout.scoring import finished_samples, open_scorer
from lightrft.rollout.single_turn import generate
from lightrft.rollout.source import SampleRequests, Samples
from lightrft.rollout.workers import EpisodeError

if TYPE_CHECKING:
    from lightrft.engines.media.sources import ImageSource

# Episodes of an evaluation, in the same workers, have smaller numbers.
_FIRST_NUMBER = 2**32


@dataclass(frozen=True, slots=True)
class _Late:
    """An episode whose last turn is answered, or rewarded, while others go on.

    Args:
        episode: Episode with that turn and its results.
        entry: Ledger entry of the episode.
        answered: Future of the answer or reward.
    """

    episode: Episode
    entry: SampleEntry
    answered: Future[EpisodeError | None]


@dataclass(slots=True)
class _Hosted:
    """An episode that this process knows.

    Args:
        number: Number of its environment in the worker; None once that has ended.
        sample: Its latest value; None while it goes on.
        generation: Generation of the worker.
        late: Work on it beyond that sample.
    """

    number: int | None
    sample: OpenSample | None = None
    generation: int = 0
    late: _Late | None = None

    def settle(self) -> None:
        """Wait until no request to the environment is in flight."""
        if self.late is not None:
            wait([self.late.answered])
            self.late = None


class OpenEpisodes:
    """Open responses that are episodes; see `OpenResponses`.

    Args:
        work: Work on the episodes of the run.
    """

    def __init__(self, work: EpisodeWork) -> None:
        self._work = work
        self._hosted: dict[int, _Hosted] = {}

    def begin(self, request_id: int, prompt: Prompt, params: SamplingParams) -> OpenGroup:
        """Begin a group of open episodes."""
        sample_ids = range(request_id * params.n, (request_id + 1) * params.n)
        samples = tuple(OpenSample(episode=EpisodeState(each)) for each in sample_ids)
        return OpenGroup(request_id, prompt, samples, params.logprobs_mode)

    def extended(self, groups: Sequence[OpenGroup], part: ResponsePart) -> list[OpenGroup]:
        """Sample a further part of each group.

        Raises:
            RewardError: An environment failed on some rank, and failures are not masked.
        """
        self._forget_others(groups)
        ledger, places, episodes = SampleLedger(), list[tuple[int, int]](), list[Episode]()
        batch = self._work.batch(episodes, part.params, journal=Journal(None, {}), ledger=ledger)
        numbers = self._free_numbers()
        for place, group in enumerate(groups):
            for index, sample in enumerate(group.samples):
                if part.takes(group, sample):
                    episode = self._resume(batch, group, index, numbers)
                    episode.max_sampled = self._most(episode, part.lengths[group.request_id])
                    episodes.append(episode)
                    places.append((place, index))
        problem = self._host(batch, [groups[place].prompt for place, _ in places])
        while batch.is_open_anywhere(problem):
            problem = self._round(batch, part.round_number + self._work.parts.config.tool_lag)
        ended = replace(batch, episodes=[e for e in episodes if not e.is_open and not e.is_late])
        rewards = self._work.finish(ended, self._work.keep(ended))
        extended = list(groups)
        for (place, index), episode in zip(places, episodes, strict=True):
            samples = list(extended[place].samples)
            samples[index] = self._snapshot(episode, ledger, rewards.get(episode.number))
            extended[place] = extended[place].extended(samples, part.round_number)
        return extended

    def finished(
        self, groups: Sequence[OpenGroup], group_ids: Sequence[int], requests: SampleRequests
    ) -> Samples:
        """Return groups that have ended as samples."""
        parts = self._work.parts
        prompts, ids = [group.prompt for group in groups], [group.request_id for group in groups]
        requests.ledger.ask(prompts, group_ids, requests.params.n, ids)
        rollouts, rewards = list[Rollout](), list[RewardResult | None]()
        for group, group_id in zip(groups, group_ids, strict=True):
            for index, sample in enumerate(group.samples):
                episode = self._episode(group, index, requests.params)
                self._hosted.pop(episode.sample_id, None)
                episode.group_id = group_id
                episode.sample_id = group_id * len(group.samples) + index
                rollouts.append(episode.as_rollout())
                rewards.append(_state(sample).reward)
                entry = requests.ledger.of(episode.sample_id)
                _note(entry, episode.prompt, sample)
                if parts.config.ledger_gate:
                    self._work.turns.check_observations(rollouts[-1], entry)
        samples = finished_samples(
            parts,
            requests,
            rollouts,
            scorer=open_scorer(parts, replace(requests, prompts=prompts)),
            environment_results=rewards,
            special_ids=self._work.special_ids,
            carried=requests.stream.entries,
        )
        return replace(samples, tool_names=self._work.specs.tool_names)

    def _forget_others(self, groups: Sequence[OpenGroup]) -> None:
        """End environments of episodes in no group, whose step was abandoned."""
        known = {g.request_id * len(g.samples) + i for g in groups for i in range(len(g.samples))}
        lost = [self._hosted.pop(each) for each in self._hosted.keys() - known]
        for hosted in lost:
            hosted.settle()
        numbers = [hosted.number for hosted in lost if hosted.number is not None]
        wait(self._work.pool.forget(numbers))

    def _free_numbers(self) -> Iterator[int]:
        """Yield the smallest free numbers, so that workers have equally many episodes."""
        taken = {each.number for each in self._hosted.values()}
        return (number for number in count(_FIRST_NUMBER) if number not in taken)

    def _most(self, episode: Episode, length: int | None) -> int | None:
        """Return an episode's token limit after a part; waiting saves none for later."""
        config = self._work.parts.config
        if length is None or config.stream_chunk is None or not config.tool_lag:
            return length
        return min(length, episode.num_sampled + config.stream_chunk)

    def _resume(
        self, batch: EpisodeBatch, group: OpenGroup, index: int, numbers: Iterator[int]
    ) -> Episode:
        """Return an episode that goes on, with its environment if that matches."""
        sample, sample_id = group.samples[index], group.request_id * len(group.samples) + index
        hosted = self._hosted.get(sample_id)
        if hosted is not None and hosted.late is not None and hosted.sample is sample:
            late, hosted.late, hosted.sample = hosted.late, None, None
            batch.busy[late.episode.number] = late.answered
            batch.ledger.entries[sample_id] = late.entry
            late.episode.is_late = False
            return late.episode
        episode = self._episode(group, index, batch.params)
        batch.ledger.of(sample_id).answers = _answers(sample)
        if hosted is None:
            hosted = _Hosted(next(numbers))
            self._hosted[sample_id] = hosted
        hosted.settle()
        if hosted.number is None:
            hosted.number = next(numbers)
        episode.number = hosted.number
        if episode.segments:
            episode.generation = hosted.generation if hosted.sample is sample else -1
        # If this part is abandoned, the environment's state is unknown.
        hosted.sample = None
        return episode

    def _episode(self, group: OpenGroup, index: int, params: SamplingParams) -> Episode:
        """Return an episode as a part has left it."""
        sample = group.samples[index]
        state = _state(sample)
        episode = self._work.new_episode(group.prompt, group.request_id, index, params)
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

    def _host(self, batch: EpisodeBatch, prompts: Sequence[Prompt]) -> Exception | None:
        """Restore environments that do not match, and begin new episodes.

        Args:
            batch: Episodes that go on.
            prompts: Prompt of each, without the message of `reset`.
        """
        waiting = [e for e in batch.episodes if e.number not in batch.busy]
        away = [e for e in waiting if e.segments and e.generation < 0]
        problem = batch.each(away, self._bring_back)
        unanswered = [e for e in waiting if e.is_unanswered]
        for episode in unanswered:
            self._work.turns.parse_turn(batch, episode)
        problem = batch.each(unanswered, partial(self._answer, batch)) or problem
        new = []
        for episode, prompt in zip(batch.episodes, prompts, strict=True):
            if not episode.segments and episode.is_open:
                # Also if it starts over: the new message of `reset` counts.
                episode.prompt, episode.generation = prompt, 0
                new.append(episode)
        problem = self._work.reset(replace(batch, episodes=new)) or problem
        for episode in new:
            if episode.no_room is not None:
                problem = batch.failed(episode, episode.no_room) or problem
        return problem

    def _bring_back(self, episode: Episode, host: Host) -> None:
        try:
            episode.host_on(host)
        except OtherAnswerError as error:
            raise ChangedAnswerError(str(error)) from error

    def _answer(self, batch: EpisodeBatch, episode: Episode, host: Host) -> None:
        """Answer the calls of a turn, or reward an episode that ends in it."""
        work = self._work.answer_calls if episode.is_open else self._work.reward
        work(batch, episode, host)

    def _round(self, batch: EpisodeBatch, due: int) -> Exception | None:
        """Sample a turn, or part of one, per episode, and answer its calls; collective.

        Args:
            batch: Episodes that go on.
            due: Round in which late episodes go on.
        """
        asked, going = list[GenerationRequest](), dict[int, Episode]()
        for episode in batch.episodes:
            if episode.may_sample:
                asked.append(self._work.turns.request(batch, episode))
                going[asked[-1].request_id] = episode

        def take(finished: Sequence[Completion]) -> None:
            for completion in finished:
                self._take(batch, going.pop(completion.request_id), completion, due)

        try:
            completions = generate(batch.session, batch.one_turn, asked, take)
            # Some engines do not call `take` for each completion.
            take([completion for completion in completions if completion.request_id in going])
        except Exception:
            wait(batch.busy.values())  # or they would use environments of the repeated step
            raise
        return batch.collect(lambda: True)

    def _take(
        self, batch: EpisodeBatch, episode: Episode, completion: Completion, due: int
    ) -> None:
        """Append what was sampled, and start the environment's work on a whole turn."""
        self._work.turns.append(batch, episode, completion)
        if episode.is_cut:
            return
        episode.is_late = self._work.parts.config.tool_lag > 0 and episode.max_sampled is not None
        hosted, entry = self._hosted[episode.sample_id], batch.ledger.of(episode.sample_id)
        if episode.is_late:
            hosted.sample = self._so_far(episode, entry, None, due)
        self._work.turns.parse_turn(batch, episode)
        if episode.is_open or episode.is_late:
            batch.begin([episode], partial(self._answer, batch))
        if episode.is_late:
            hosted.late = _Late(episode, entry, batch.busy.pop(episode.number))

    def _snapshot(
        self, episode: Episode, ledger: SampleLedger, reward: RewardResult | None
    ) -> OpenSample:
        """Return an episode as a part leaves it."""
        hosted = self._hosted[episode.sample_id]
        if hosted.sample is not None:
            return hosted.sample
        value = self._so_far(episode, ledger.of(episode.sample_id), reward)
        hosted.sample, hosted.generation = value, episode.generation
        if not episode.is_open:
            hosted.number = None
        return value

    def _so_far(
        self, episode: Episode, entry: SampleEntry, reward: RewardResult | None, due: int = 0
    ) -> OpenSample:
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
            reward=reward,
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

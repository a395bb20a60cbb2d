"""Episodes of one rank while they are sampled, and the work of hosts on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from lightrft.engines.ledger import hash_context
from lightrft.engines.types import Completion, SamplingParams
from lightrft.records.rollout import AnsweredCall, Rollout
from lightrft.records.sample_ledger import ENVIRONMENT, SampleLedger
from lightrft.rewards.types import KeptEnvironment, ReadsEnvironments, RewardError, RewardResult
from lightrft.rollout.environments.call_formats import MalformedCallError, ToolCall
from lightrft.rollout.environments.calls import as_error, check_call
from lightrft.rollout.environments.content import from_json
from lightrft.rollout.environments.episode import TURN_STEP, Episode
from lightrft.rollout.environments.journal import Journal
from lightrft.rollout.environments.pool import EnvironmentPool, Host, NoRoomError
from lightrft.rollout.environments.turns import Turns
from lightrft.rollout.single_turn import generate
from lightrft.rollout.source import SourceParts, agree
from lightrft.rollout.workers import EpisodeError

# Distance between an episode's request ids before and after a restart.
START_STEP = 2**54
Work = Callable[[Episode, Host], None]
Take = Callable[[Episode, Completion], None]


class ChangedAnswerError(EpisodeError):
    """An answer differs from the journal: the episode starts over."""


@dataclass(slots=True)
class EpisodeBatch:
    """Episodes that are sampled together, and the work of hosts on them.

    Args:
        parts: Parts of the run.
        pool: Workers that host the environments.
        turns: Turns as ids and as text.
        params: Sampling parameters of turns.
        episodes: Episodes of this rank.
        journal: Journal of this rank.
        ledger: Ledger of prompts, answers, rewards and failures.
        notes: Messages for the console.
        problems: Errors of this rank; the first of all ranks is raised on each.
        finished_ids: Groups that `finished_groups` has returned.
    """

    parts: SourceParts
    pool: EnvironmentPool
    turns: Turns
    params: SamplingParams
    episodes: Sequence[Episode]
    journal: Journal
    ledger: SampleLedger
    notes: list[str] = field(default_factory=list)
    problems: list[Exception] = field(default_factory=list)
    finished_ids: set[int] = field(default_factory=set)

    @property
    def busy(self) -> list[Future[EpisodeError | None]]:
        """Work of hosts that is waited for."""
        return [e.work for e in self.episodes if e.work is not None and not e.is_late]

    @property
    def _masks_failures(self) -> bool:
        return self.parts.config.reward_failure == "mask"

    @property
    def _keeps_environments(self) -> bool:
        """True if reward functions read the environments."""
        function = self.parts.reward_function
        return isinstance(function, ReadsEnvironments) and function.reads_environments

    def of(self, episodes: Sequence[Episode]) -> EpisodeBatch:
        """Return some of the episodes as a batch that shares work, notes and records."""
        return replace(self, episodes=episodes)

    def finished_groups(self) -> list[list[Rollout]]:
        """Return the groups whose last episode has ended since the last time."""
        groups: dict[int, list[Episode]] = {}
        for episode in self.episodes:
            if episode.group_id not in self.finished_ids:
                groups.setdefault(episode.group_id, []).append(episode)
        finished = [group for group in groups.values() if not any(e.is_open for e in group)]
        self.finished_ids.update(group[0].group_id for group in finished)
        return [[episode.as_rollout() for episode in group] for group in finished]

    def is_open_anywhere(self) -> bool:
        """Return whether any rank has an open episode; raise on all if one has a problem."""
        is_open, notes = any(e.may_sample for e in self.episodes), tuple(self.notes)
        self.notes.clear()
        return any(agree(self.parts.context, next(iter(self.problems), None), is_open, notes))

    def sample(self, episodes: Sequence[Episode], take: Take) -> None:
        """Sample a turn, or a part of one, of each episode; collective.

        Args:
            episodes: Episodes of this rank.
            take: Function called with each completion while the others are sampled.
        """
        sampling = {e.next_request_id: e for e in episodes}

        def take_all(finished: Sequence[Completion]) -> None:
            for completion in finished:
                take(sampling.pop(completion.request_id), completion)

        requests = [self.turns.request(e, self.params.max_tokens) for e in episodes]
        session, params = self.parts.session, replace(self.params, n=1)
        try:
            completions = generate(session, params, requests, take_all)
            # Some engines do not call `take_all` with each completion.
            take_all([each for each in completions if each.request_id in sampling])
        except Exception:
            wait(self.busy)  # or they would use environments of the repeated step
            raise

    def repeat(self, episodes: Sequence[Episode], take: Take) -> list[Episode]:
        """Call `take` with recorded turns; return the episodes without one."""
        engine = self.parts.session.engine
        version = -1 if engine is None else engine.weights_version
        new = []
        for episode in episodes:
            turn = self.journal.recorded.turns.get((episode.sample_id, episode.num_turns))
            if turn is None or hash_context(episode.context) != turn.context_hash:
                if turn is not None:
                    text = f"turn {turn.turn}: the ids before it are others"
                    self.start_over(episode, ChangedAnswerError(text))
                new.append(episode)
                continue
            episode.request_id = turn.sampled.request_id - TURN_STEP * turn.turn
            if engine is not None:
                engine.ledger.restore([turn.entry(version, self.params.distribution)])
            take(episode, turn.completion(episode.context, version))
        return new

    def append(self, episode: Episode, part: Completion) -> None:
        """Append what was sampled; a turn cut by `max_sampled` stays open."""
        self.turns.append(episode, part, self.params.max_tokens)

    def parse_turn(self, episode: Episode) -> None:
        """Parse the calls of the last turn, or end the episode."""
        problem = self.turns.parse(episode)
        if not episode.is_open:
            return
        episode.answers.append([])
        self.ledger.of(episode.sample_id).answers[episode.num_turns - 1] = []
        if problem is not None:
            self._add_answer(episode, AnsweredCall("", {}, "malformed", as_error(problem)))

    def observe(self, episode: Episode) -> None:
        """Append the answers of the last turn, or end the episode.

        Raises:
            ImageRefusedError: Images of an answer cannot be shown.
        """
        self.turns.observe(episode)
        if episode.is_open:
            self.journal.observation(episode)

    def _add_answer(self, episode: Episode, answer: AnsweredCall) -> None:
        self.journal.answer(episode, answer)
        shown_by_turn = self.ledger.of(episode.sample_id).answers
        shown_by_turn[episode.num_turns - 1].append(answer.shown)
        episode.answers[-1].append(answer)

    def start_over(self, episode: Episode, error: ChangedAnswerError) -> None:
        """Forget an episode except for its prompt, and note why."""
        index, engine = episode.sample_id % self.params.n, self.parts.session.engine
        self.notes.append(f"sample {index} of prompt {episode.prompt.id} starts over: {error}")
        self.journal.again(episode, str(error))
        if engine is not None:
            engine.ledger.discard({turn.request_id for turn in episode.segments})
        episode.start_over()
        episode.request_id += START_STEP

    def failed(self, episode: Episode, error: EpisodeError) -> None:
        """Mark an episode as failed, which is a problem unless failures are masked."""
        self.journal.failed(episode, str(error))
        self.journal.recorded.forget(episode.sample_id)
        episode.failure, episode.is_open = error, False
        self.ledger.of(episode.sample_id).has_failed = True
        if not self._masks_failures:
            text = f"the environment failed for prompt {episode.prompt.id}: {error}"
            self.problems.append(RewardError(text))

    def begin(self, episodes: Sequence[Episode], work: Work) -> None:
        """Begin work on episodes on their hosts; `collect` waits for it."""
        for episode in episodes:
            episode.work = self.pool.begin(episode.number, partial(self._work, work, episode))

    def _work(self, work: Work, episode: Episode, host: Host) -> None:
        known = self.journal.recorded.failures.get((episode.sample_id, episode.num_turns))
        if known is not None and self._masks_failures:
            raise EpisodeError(known)  # a repeated deadline could end otherwise
        work(episode, host)

    def collect(self, must_wait: Callable[[], bool] = lambda: True) -> None:
        """Wait for work on hosts.

        Args:
            must_wait: Function that returns whether to wait for busy work.
        """
        while self.busy:
            for episode in self.episodes:
                if episode.work is not None and episode.work.done() and not episode.is_late:
                    self._end_work(episode, episode.work)
            if self.busy and must_wait():
                wait(self.busy, return_when=FIRST_COMPLETED)
            elif self.busy:
                break

    def _end_work(self, episode: Episode, work: Future[EpisodeError | None]) -> None:
        episode.work = None
        try:
            outcome = work.result()
        except Exception as error:  # noqa: BLE001 - sent to all ranks, then raised
            self.problems.append(error)
            return
        if isinstance(outcome, ChangedAnswerError):
            self.start_over(episode, outcome)
        elif isinstance(outcome, NoRoomError) and not episode.segments:
            episode.no_room = outcome
        elif outcome is not None:
            self.failed(episode, outcome)
        elif episode.is_answered:
            try:
                self.observe(episode)
            except EpisodeError as error:
                self.failed(episode, error)

    def each(self, episodes: Sequence[Episode], work: Work) -> None:
        """Work on episodes on their hosts, and wait for all of it."""
        self.begin(episodes, work)
        self.collect()

    def reset(self) -> None:
        """Begin the episodes; add the message of `reset` to each prompt."""
        for episode in self.episodes:
            episode.no_room = None
        self.each(self.episodes, Episode.host_on)
        for episode in self.episodes:
            if episode.failure is None and episode.no_room is None:
                try:
                    self._add_message(episode)
                except EpisodeError as error:
                    self.failed(episode, error)

    def _add_message(self, episode: Episode) -> None:
        num_images = len(episode.prompt.images)
        episode.prompt = self.turns.with_reset_message(episode)
        before = self.journal.recorded.messages
        recorded = before.get(episode.sample_id, episode.reset_message)
        has_images = episode.prompt.images[num_images:]
        if has_images and recorded != episode.reset_message:
            # Different images may have the same tokens.
            self.start_over(episode, ChangedAnswerError("reset answered otherwise"))

    def answer_calls(self, episode: Episode, host: Host) -> None:
        """Make the remaining calls of the last turn in order; runs in a thread of the host.

        Answers must equal those in the journal of a killed process.
        """
        turn, answered = episode.num_turns - 1, episode.answers[-1]
        known = self.journal.recorded.answers.get((episode.sample_id, turn), [])
        if episode.pending:
            episode.host_on(host)
        for call in episode.pending[len(answered) :]:
            before = known[len(answered)] if len(answered) < len(known) else None
            answer = self._execute_call(episode, call, host, before)
            if before is not None and before.said != answer.said:
                raise ChangedAnswerError(
                    f"turn {turn}: {call.name} answered {answer.text[:80]!r}, where the journal "
                    f"says {before.text[:80]!r}"
                )
            self._add_answer(episode, answer)
            if answer.ends_episode:
                break

    def after_turn(self, episode: Episode, host: Host) -> None:
        """Answer the calls of a turn, or reward an episode that ends in it."""
        work = self.answer_calls if episode.is_open else self.reward
        work(episode, host)

    def _execute_call(
        self, episode: Episode, call: ToolCall, host: Host, before: AnsweredCall | None
    ) -> AnsweredCall:
        """Make one call; return its answer, never raise an exception of the tool."""
        try:
            arguments = check_call(call, episode.environment.spec.functions)
        except MalformedCallError as error:
            return AnsweredCall("", {}, "malformed", as_error(str(error)))
        limit, num_made = self.parts.config.max_tool_calls, len(episode.made_calls)
        if limit is not None and num_made >= limit:
            text = as_error(f"no calls are left: {limit} were allowed")
            return AnsweredCall(call.name, arguments, "refused", text)
        is_stateless = call.name in host.stateless
        # A journal names images but does not hold them: request them again.
        if before is not None and is_stateless and not self.turns.chat.encoder.reads_media:
            return before
        start = time.perf_counter()
        answer = episode.call(host, call.name, arguments, num_made)
        return AnsweredCall(
            call.name,
            arguments,
            "error" if "error" in answer else "ok",
            str(answer["text"]),
            time.perf_counter() - start,
            ends_episode="ends_episode" in answer,
            content=from_json(answer.get("content"), f"an image that {call.name} answered with"),
            reward=float(cast("float", answer.get("reward", 0.0))),
        )

    def keep(self) -> None:
        """Store what reward functions read of the episodes that have ended."""
        if not self._keeps_environments:
            return
        ended = [e for e in self.episodes if not e.is_open and e.failure is None and e.kept is None]
        # The others may be busy.
        self.of(ended).each(ended, self._keep)

    def _keep(self, episode: Episode, host: Host) -> None:
        """Store the attributes of an environment for reward functions."""
        attributes = episode.ask(host, "keep")
        episode.kept = KeptEnvironment(
            *cast("tuple[str, dict[str, dict[str, object]]]", attributes)
        )

    def reward(self, episode: Episode, host: Host) -> None:
        """Reward an episode that has ended; runs in a thread of the host."""
        if self._keeps_environments and episode.kept is None:
            self._keep(episode, host)
        result = episode.reward = self._reward(episode, host)
        self.ledger.of(episode.sample_id).reward_is(ENVIRONMENT, result, episode.context)

    def _reward(self, episode: Episode, host: Host) -> RewardResult:
        """Return the reward of an episode by its environment."""
        if not episode.environment.spec.has_reward:
            return RewardResult(0.0)
        answer = episode.ask(host, "reward")
        if answer is None:
            raise EpisodeError("get_reward returned None")
        at_end, parts = cast("tuple[float, dict[str, float]]", answer)
        total = sum(call.reward for turn in episode.answers for call in turn) + at_end
        return RewardResult(total, {str(episode.environment.spec.name): total, **parts})

    def finish(self) -> None:
        """Reward and close episodes that have ended; collective."""
        unpaid = [e for e in self.episodes if e.failure is None and e.reward is None]
        self.each(unpaid, self.reward)
        # If closing fails, the episode keeps its reward.
        wait([self.pool.forget(episode.number) for episode in self.episodes])
        self.is_open_anywhere()
        for episode in self.episodes:
            self.journal.end(episode.sample_id, episode.result, episode.failure)

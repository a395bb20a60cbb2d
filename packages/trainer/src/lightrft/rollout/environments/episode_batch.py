"""Episodes of one rank while they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace

from lightrft.engines.ledger import hash_context
from lightrft.engines.types import Completion, SamplingParams
from lightrft.records.rollout import Rollout
from lightrft.records.sample_ledger import SampleLedger
from lightrft.rewards.types import RewardError
from lightrft.rollout.environments.episode import Episode
from lightrft.rollout.environments.journal import Journal, RecordedTurn
from lightrft.rollout.environments.pool import EnvironmentPool, Host, NoRoomError
from lightrft.rollout.source import agree
from lightrft.rollout.workers import EpisodeError
from lightrft.strategy.engine.session import EngineSession

# Distance between an episode's request ids: each turn samples with another id.
TURN_STEP = 2**40
# Distance between an episode's request ids before and after a restart.
START_STEP = 2**54
Work = Callable[[Episode, Host], None]


class ChangedAnswerError(EpisodeError):
    """An answer differs from the journal: the episode starts over."""


@dataclass(slots=True)
class EpisodeBatch:
    """Episodes of one call of `EpisodeSource.sample`, and the work of hosts on them.

    Args:
        session, params: Engine session and sampling parameters of turns.
        pool: Workers that host the environments.
        episodes: Episodes of this rank.
        journal: Journal of this rank.
        masks_failures: An episode that fails is left out, and raises nothing.
        observe: Function that appends the answers of an episode.
        ledger: Ledger of prompts, answers, rewards and failures.
        busy: Work of hosts, by number of the episode.
        notes: Messages for the console.
        given: Groups that `finished_groups` has returned.
    """

    session: EngineSession
    params: SamplingParams
    pool: EnvironmentPool
    episodes: Sequence[Episode]
    journal: Journal
    masks_failures: bool
    observe: Callable[[EpisodeBatch, Episode], None]
    ledger: SampleLedger = field(default_factory=SampleLedger)
    busy: dict[int, Future[EpisodeError | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    given: set[int] = field(default_factory=set)

    @property
    def one_turn(self) -> SamplingParams:
        """Sampling parameters for one sample."""
        return replace(self.params, n=1)

    def finished_groups(self) -> list[list[Rollout]]:
        """Return the groups whose last episode has ended since the last time."""
        groups: dict[int, list[Episode]] = {}
        for episode in self.episodes:
            if episode.group_id not in self.given:
                groups.setdefault(episode.group_id, []).append(episode)
        finished = [group for group in groups.values() if not any(e.is_open for e in group)]
        self.given.update(group[0].group_id for group in finished)
        return [[episode.as_rollout() for episode in group] for group in finished]

    def start_over(self, episode: Episode, error: ChangedAnswerError) -> None:
        """Forget an episode except for its prompt, and note why."""
        index = episode.sample_id % self.params.n
        self.notes.append(f"sample {index} of prompt {episode.prompt.id} starts over: {error}")
        self.journal.again(episode, str(error))
        if self.session.engine is not None:
            self.session.engine.ledger.discard({turn.request_id for turn in episode.segments})
        episode.start_over()
        episode.request_id += START_STEP

    def repeated(self, turns: Mapping[int, RecordedTurn]) -> tuple[list[Episode], list[Completion]]:
        """Return the episodes of a recorded round, and their recorded turns."""
        engine = self.session.engine
        version = -1 if engine is None else engine.weights_version
        waiting, completions = [], []
        for episode in self.episodes:
            turn = turns.get(episode.sample_id)
            if turn is None or not episode.is_open:
                continue
            if hash_context(episode.context) != turn.context_hash:
                error = ChangedAnswerError(f"turn {turn.turn}: the ids before it are others")
                self.start_over(episode, error)
                continue
            episode.request_id = turn.sampled.request_id - TURN_STEP * turn.turn
            if engine is not None:
                engine.ledger.restore([turn.entry(version, self.params.distribution)])
            waiting.append(episode)
            completions.append(turn.completion(episode.context, version))
        return waiting, completions

    def begin(self, episodes: Sequence[Episode], work: Work) -> None:
        """Begin work on episodes on their hosts; `collect` waits for it."""
        self.busy |= self._begin(episodes, work)

    def after_end(self, episodes: Sequence[Episode], work: Work) -> Exception | None:
        """Work on episodes that have ended, and wait for it alone; see `collect`."""
        futures = self._begin(episodes, work)
        problems = [self._outcome(episode, futures[episode.number]) for episode in episodes]
        return next((problem for problem in problems if problem is not None), None)

    def _begin(
        self, episodes: Sequence[Episode], work: Work
    ) -> dict[int, Future[EpisodeError | None]]:
        by_number = {episode.number: episode for episode in episodes}

        def on_host(number: int, host: Host) -> None:
            episode = by_number[number]
            known = self.journal.recorded.failures.get((episode.sample_id, episode.num_turns))
            if known is not None and self.masks_failures:
                raise EpisodeError(known)  # a repeated deadline could end otherwise
            work(episode, host)

        return self.pool.begin(list(by_number), on_host)

    def collect(self, must_wait: Callable[[], bool]) -> Exception | None:
        """Wait for work on hosts; return an error to raise, unless failures are masked.

        Args:
            must_wait: Function that returns whether to wait for busy work.
        """
        first: Exception | None = None
        while self.busy:
            for episode in self.episodes:
                future = self.busy.get(episode.number)
                if future is not None and future.done():
                    del self.busy[episode.number]
                    problem = self._outcome(episode, future)
                    first = first or problem
            if self.busy and must_wait():
                wait(self.busy.values(), return_when=FIRST_COMPLETED)
            elif self.busy:
                break
        return first

    def _outcome(self, episode: Episode, future: Future[EpisodeError | None]) -> Exception | None:
        try:
            outcome = future.result()
        except Exception as error:  # noqa: BLE001 - sent to all ranks, then raised
            return error
        if isinstance(outcome, ChangedAnswerError):
            self.start_over(episode, outcome)
        elif isinstance(outcome, NoRoomError) and not episode.segments:
            episode.no_room = outcome
        elif outcome is not None:
            return self.failed(episode, outcome)
        elif episode.is_answered:
            try:
                self.observe(self, episode)
            except EpisodeError as error:
                return self.failed(episode, error)
        return None

    def each(self, episodes: Sequence[Episode], work: Work) -> Exception | None:
        """Work on episodes on their hosts, and wait for all of it; see `collect`."""
        self.begin(episodes, work)
        return self.collect(lambda: True)

    def close(self) -> None:
        """Close all episodes; if that fails, the episode keeps its reward."""
        wait(self.pool.forget([episode.number for episode in self.episodes]))

    def failed(self, episode: Episode, error: EpisodeError) -> Exception | None:
        """Mark an episode as failed; return an error to raise, unless failures are masked."""
        self.journal.failed(episode, str(error))
        episode.failure, episode.is_open = error, False
        self.ledger.of(episode.sample_id).has_failed = True
        if self.masks_failures:
            return None
        return RewardError(f"the environment failed for prompt {episode.prompt.id}: {error}")

    def is_open_anywhere(self, problem: Exception | None) -> bool:
        """Return whether any rank has an open episode; raise on all if one has a problem."""
        is_open = any(episode.may_sample for episode in self.episodes)
        notes = tuple(self.notes)
        self.notes.clear()
        return any(agree(self.session.context, problem, is_open, notes))

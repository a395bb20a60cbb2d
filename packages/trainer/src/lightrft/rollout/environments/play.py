"""The episodes of one rank while they are sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from lightrft.engines.ledger import hash_context
from lightrft.engines.types import Completion, SamplingParams
from lightrft.records.rollout import Rollout
from lightrft.rollout.environments.episode import Episode
from lightrft.rollout.environments.journal import Journal, RecordedTurn
from lightrft.rollout.environments.pool import EpisodeError
from lightrft.strategy.strategy_base import StrategyBase

# Between the ids of the requests of an episode: every turn draws under an id of its own.
TURN_STEP = 2**40


class ChangedAnswerError(EpisodeError):
    """A continued run was answered otherwise than the journal says: the episode starts over."""


@dataclass(slots=True)
class Play:
    """The episodes of one call of `Environments.sample`.

    Args:
        strategy, params: Generate turns.
        episodes: This rank's.
        journal: Of this rank.
        busy: What hosts do, by number of the episode.
        notes: For the console.
        given: Groups that `finished_groups` has given.
    """

    strategy: StrategyBase
    params: SamplingParams
    episodes: Sequence[Episode]
    journal: Journal
    busy: dict[int, Future[EpisodeError | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    given: set[int] = field(default_factory=set)

    @property
    def one_turn(self) -> SamplingParams:
        """Of one sample."""
        return replace(self.params, n=1)

    def finished_groups(self) -> list[list[Rollout]]:
        """The groups whose last episode has ended since the last time."""
        groups: dict[int, list[Episode]] = {}
        for episode in self.episodes:
            if episode.group_id not in self.given:
                groups.setdefault(episode.group_id, []).append(episode)
        finished = [group for group in groups.values() if not any(e.is_open for e in group)]
        self.given.update(group[0].group_id for group in finished)
        return [[episode.as_rollout() for episode in group] for group in finished]

    def start_over(self, episode: Episode, error: ChangedAnswerError) -> None:
        """Forgets an episode but its prompt, and says so."""
        self.notes.append(f"sample {episode.sample_id} starts over: {error}")
        self.journal.again(episode, str(error))
        episode.start_over()

    def repeated(self, turns: Mapping[int, RecordedTurn]) -> tuple[list[Episode], list[Completion]]:
        """The episodes of a recorded round, and their turns as the journal has them."""
        engine = self.strategy.inference_engine
        version = -1 if engine is None else engine.weights_version
        waiting, found = [], []
        for episode in self.episodes:
            turn = turns.get(episode.sample_id)
            if turn is None or not episode.is_open:
                continue
            if hash_context(episode.context) != turn.context_hash:
                error = ChangedAnswerError(f"turn {turn.turn}: the ids before it are others")
                self.start_over(episode, error)
                continue
            if engine is not None:
                engine.ledger.restore([turn.entry(version)])
            waiting.append(episode)
            found.append(turn.completion(episode.context, version))
        return waiting, found

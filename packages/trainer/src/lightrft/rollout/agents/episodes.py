"""One episode of an agent: its calls, its reward, and its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightrft.datasets.types import Prompt
from lightrft.engines.media.media import Media
from lightrft.engines.types import Completion
from lightrft.records.rollout import ResponseTurns, Rollout
from lightrft.records.table import branch_id
from lightrft.rewards.types import RewardResult
from lightrft.rollout.agents.conversations import CalledTurn, Conversations
from lightrft.rollout.agents.replies import told
from lightrft.rollout.source import AGENT_COUNTS
from lightrft.rollout.transcript import Transcript


@dataclass(slots=True)
class AgentEpisode:
    """An episode in progress.

    Args:
        number: Index among the episodes of this rank.
        prompt: The data row.
        group_id, sample_id: As in `Rollout`.
        row: Row that the agent receives.
        talk: Calls of the agent.
        known: Earlier completions by request id, from a killed process or before the agent was
            restarted.
    """

    number: int
    prompt: Prompt
    group_id: int
    sample_id: int
    row: dict[str, object]
    talk: Conversations
    key: str = ""
    known: dict[int, Completion] = field(default_factory=dict)
    is_open: bool = True
    failure: str = ""
    reward: RewardResult | None = None
    num_calls: int = 0
    num_restarts: int = 0

    def restart(self) -> None:
        """Discard all calls, but keep their answers for equal calls."""
        self.known |= {turn.request_id: turn.sampled for turn in self.talk.turns}
        before = self.talk
        self.talk = Conversations(before.chat, before.episode_id, before.repeats_seeds)
        self.num_calls, self.num_restarts = 0, self.num_restarts + 1

    def rollouts(self) -> list[Rollout]:
        """Return at least one row; the first represents the episode.

        A failed episode is one row without tokens.
        """
        rows = [] if self.failure else self.talk.branches()
        if not rows:
            return [self.to_rollout(0, [])]
        return [self.to_rollout(number, row) for number, row in enumerate(rows)]

    def to_rollout(self, number: int, turns: list[CalledTurn]) -> Rollout:
        """Make the rollout of one branch of turns."""
        row, request_id = Transcript(prompt=self.prompt), self.talk.episode_id
        if turns:
            # The agent chose which parts of the row the model sees.
            ids, request_id = turns[0].context, turns[-1].sampled.request_id
            row.prompt = replace(self.prompt, token_ids=ids, messages=(), media=Media())
            row.later += turns[0].later
        for place, turn in enumerate(turns):
            if place:
                row.add_observation(turn.before)
            row.add_turn(turn.sampled, told(turn).text)
        return row.as_sample(
            request_id,
            self.group_id,
            branch_id(self.sample_id, number),
            text="\n".join(filter(None, row.turn_texts)),
            conversation=ResponseTurns(tuple(row.turn_texts), (), self.num_restarts),
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of its calls by name, for metrics."""
        kept = sum(len(row) for row in self.talk.branches())
        num_calls = len(self.talk.turns)
        num_malformed = sum(turn.is_malformed for turn in self.talk.turns)
        counts = num_calls, num_calls - kept, len(self.talk.branches()), num_malformed
        return dict(zip(AGENT_COUNTS, (*counts, self.num_restarts), strict=True))

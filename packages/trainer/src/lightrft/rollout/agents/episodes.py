"""One episode of an agent: its calls, its reward, and its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from lightrft.datasets.types import Prompt
from lightrft.engines.media.media import Media
from lightrft.engines.types import Completion
from lightrft.records.columns import join_facts
from lightrft.records.rollout import ResponseTurns, Rollout, TurnSegment
from lightrft.records.table import branch_id
from lightrft.rewards.types import RewardResult
from lightrft.rollout.agents.conversations import CalledTurn, Conversations
from lightrft.rollout.agents.replies import told
from lightrft.rollout.source import AGENT_COUNTS


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
        if not turns:
            prompt = self.prompt
            completion = Completion(
                self.talk.episode_id, 0, prompt.token_ids, (), (), "temperature", "abort"
            )
        else:
            # The agent chose which parts of the row the model sees.
            ids, none = turns[0].context, Media()
            prompt = replace(self.prompt, token_ids=ids, messages=(), media=none)
            completion = joined_completion(turns)
        texts = tuple(told(turn).text for turn in turns)
        return Rollout(
            prompt=prompt,
            completion=completion,
            group_id=self.group_id,
            sample_id=branch_id(self.sample_id, number),
            response_text="\n".join(filter(None, texts)),
            token_versions=sampled_versions(turns),
            segments=join_segments(turns),
            conversation=ResponseTurns(texts, (), self.num_restarts),
            later=turns[-1].later if turns else (),
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of its calls by name, for metrics."""
        kept = sum(len(row) for row in self.talk.branches())
        num_calls = len(self.talk.turns)
        num_malformed = sum(turn.is_malformed for turn in self.talk.turns)
        counts = num_calls, num_calls - kept, len(self.talk.branches()), num_malformed
        return dict(zip(AGENT_COUNTS, (*counts, self.num_restarts), strict=True))


def join_segments(turns: list[CalledTurn]) -> tuple[TurnSegment, ...]:
    """Return the segment of each turn of a branch."""
    segments = []
    for turn, following in zip_longest(turns, turns[1:]):
        seen = ((), ()) if following is None else _shown(following)
        segments.append(TurnSegment(turn.sampled.request_id, turn.sampled.sample_index, *seen))
    return tuple(segments)


def _shown(turn: CalledTurn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    return turn.before.token_ids, turn.before.text_spans


def joined_completion(turns: list[CalledTurn]) -> Completion:
    """Join the sampled tokens of a row and the observations between them into one response."""
    ids, logprobs, sampled = list[int](), list[float](), list[bool]()
    parts = []
    for number, turn in enumerate(turns):
        shown = turn.before.token_ids if number else ()
        answer = turn.sampled
        ids += [*shown, *answer.output_token_ids]
        logprobs += [*([0.0] * len(shown)), *answer.output_logprobs]
        sampled += [*([False] * len(shown)), *([True] * len(answer.output_token_ids))]
        parts += [(len(shown), {}), (len(answer.output_token_ids), answer.facts)]
    last = turns[-1].sampled
    return replace(
        last,
        prompt_token_ids=turns[0].context,
        output_token_ids=tuple(ids),
        output_logprobs=tuple(logprobs),
        sampled=tuple(sampled),
        facts=join_facts(*parts),
    )


def sampled_versions(turns: list[CalledTurn]) -> tuple[int, ...]:
    """Return the weights version of each token of a branch, -1 where nothing was sampled."""
    versions = []
    for number, turn in enumerate(turns):
        versions += [-1] * (len(turn.before.token_ids) if number else 0)
        versions += [turn.sampled.weights_version] * len(turn.sampled.output_token_ids)
    return tuple(versions)

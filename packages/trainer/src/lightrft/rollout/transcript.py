"""Row of a response of several turns: its ids, and for each who sampled it or that it was shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightrft.datasets.chat_ids import Rendered
from lightrft.datasets.types import Prompt
from lightrft.engines.media.media import LaterImages
from lightrft.engines.types import Completion, Facts
from lightrft.records.columns import join_facts
from lightrft.records.rollout import ResponseTurns, Rollout, TurnSegment
from lightrft.rewards.types import KeptEnvironment


@dataclass(slots=True, kw_only=True)
class Transcript:
    """A row so far.

    Args:
        prompt: Data row, with the ids before the first turn.
        token_ids, logprobs, sampled, versions: Values of each token after the prompt.
        facts: Further values of these tokens, as in `Completion`.
        segments: Calls of the engine, each with the observation after it.
        turn_texts: Text of each turn.
        last: Last turn.
        is_cut: The last turn goes on.
        later: Images after the prompt's.
    """

    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)
    segments: list[TurnSegment] = field(default_factory=list)
    turn_texts: list[str] = field(default_factory=list)
    last: Completion | None = None
    is_cut: bool = False
    later: list[LaterImages] = field(default_factory=list)

    @property
    def context(self) -> tuple[int, ...]:
        """Ids that precede the next turn."""
        return (*self.prompt.token_ids, *self.token_ids)

    def add_turn(self, turn: Completion, text: str, *, is_cut: bool = False) -> None:
        """Append what was sampled of a turn.

        Args:
            turn: Part that one call of the engine sampled.
            text: Text of the whole turn so far.
            is_cut: The turn goes on.
        """
        self._extend(turn.output_token_ids, turn.output_logprobs, turn.weights_version, turn.facts)
        self.sampled += [True] * len(turn.output_token_ids)
        self.segments.append(TurnSegment(turn.request_id, turn.sample_index))
        if self.is_cut and self.last is not None:
            turn = join_completions(self.last, turn)
            self.turn_texts.pop()
        self.turn_texts.append(text)
        self.last, self.is_cut = turn, is_cut

    def add_observation(self, found: Rendered) -> None:
        """Append ids that nobody sampled."""
        ids, place = found.token_ids, len(self.context)
        self.later += [replace(each, start=each.start + place) for each in found.later]
        self._extend(ids, [0.0] * len(ids), -1, {})
        self.sampled += [False] * len(ids)
        turn = self.segments[-1]
        self.segments[-1] = TurnSegment(turn.request_id, turn.sample_index, ids, found.text_spans)

    def _extend(
        self, ids: Sequence[int], logprobs: Sequence[float], version: int, facts: Facts
    ) -> None:
        self.facts = join_facts((len(self.token_ids), self.facts), (len(ids), facts))
        self.token_ids += ids
        self.logprobs += logprobs
        self.versions += [version] * len(ids)

    def completion(self, request_id: int) -> Completion:
        """Return the whole response as one completion of the prompt."""
        last = self.last
        if last is None:  # the episode failed before the first turn
            last = Completion(request_id, 0, (), (), (), "temperature", "abort")
        return replace(
            last,
            request_id=request_id,
            prompt_token_ids=self.prompt.token_ids,
            output_token_ids=tuple(self.token_ids),
            output_logprobs=tuple(self.logprobs),
            sampled=tuple(self.sampled),
            facts=self.facts,
        )

    def as_sample(
        self,
        request_id: int,
        group_id: int,
        sample_id: int,
        *,
        text: str,
        conversation: ResponseTurns,
        kept: KeptEnvironment | None = None,
    ) -> Rollout:
        """Return the finished row as a sample.

        Args:
            request_id: Request id of its completion.
            group_id, sample_id: As in `Rollout`.
            text: Texts of its turns.
            conversation: Its turns and their answers.
            kept: State that its environment kept for a reward function.
        """
        return Rollout(
            prompt=self.prompt,
            completion=self.completion(request_id),
            group_id=group_id,
            sample_id=sample_id,
            response_text=text,
            token_versions=tuple(self.versions),
            segments=tuple(self.segments),
            conversation=conversation,
            later=tuple(self.later),
            environment=kept,
        )


def join_completions(first: Completion, rest: Completion) -> Completion:
    """Return a completion and the part that a further call of the engine sampled, as the latter."""
    lengths = len(first.output_token_ids), len(rest.output_token_ids)
    return replace(
        rest,
        prompt_token_ids=first.prompt_token_ids,
        output_token_ids=(*first.output_token_ids, *rest.output_token_ids),
        output_logprobs=(*first.output_logprobs, *rest.output_logprobs),
        facts=join_facts((lengths[0], first.facts), (lengths[1], rest.facts)),
    )

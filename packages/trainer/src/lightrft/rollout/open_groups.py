"""Groups whose responses continue in later steps: the state of streaming rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import LedgerEntry
from lightrft.engines.types import Completion, Facts, FinishReason, LogprobsMode
from lightrft.records.columns import join_facts
from lightrft.records.rollout import AnsweredCall, TurnSegment
from lightrft.rewards.types import RewardResult


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """State of an episode without its tokens, with which another process can continue it.

    Args:
        request_id: Request id of its first engine call; each restart takes a new one.
        message: Message that `reset` returned.
        prompt_text, prompt_ids, messages: Rendered prompt with that message, once the episode has
            begun. It is stored because rendering again may give another result.
        sampled: Flag per token: whether the model sampled it.
        turns: Text of each turn without special tokens.
        answers: Answered calls of each turn.
        noted: Texts of the answers as they arrived, turn by turn.
        num_last, last_reason: Number of tokens of the last turn so far, and why its last call
            ended.
        is_cut: Whether the last turn continues.
        due: First round in which it may continue.
        has_failed: Whether its environment failed.
        num_restarts, num_forgotten: Counts, as in `Episode`.
        reward, scored: Reward of the environment, and hashes of the token ids that received it.
        kept: JSON text of values that the environment kept for the reward function, or "". User
            code defines the values, so checkpoints hold them as text.
    """

    request_id: int
    message: str | None = None
    prompt_text: str = ""
    prompt_ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, object], ...] = ()
    sampled: tuple[bool, ...] = ()
    turns: tuple[str, ...] = ()
    answers: tuple[tuple[AnsweredCall, ...], ...] = ()
    noted: tuple[tuple[tuple[str, ...], ...], ...] = ()
    num_last: int = 0
    last_reason: FinishReason = "abort"
    is_cut: bool = False
    due: int = 0
    has_failed: bool = False
    num_restarts: int = 0
    num_forgotten: int = 0
    reward: RewardResult | None = None
    scored: tuple[str, ...] = ()
    kept: str = ""


@dataclass(frozen=True, slots=True)
class OpenSample:
    """A response that may be unfinished.

    Args:
        token_ids: Token ids so far.
        logprobs: fp32 logprob of each token under the weights that sampled it.
        versions: Version of those weights, for each token.
        finish_reason: Reason why it ended; None while it is open.
        segments: Engine calls that sampled it.
        facts: Facts, as in `Completion`.
        episode: State of an episode, or None. Its tokens include observations, with version -1.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    segments: tuple[TurnSegment, ...] = ()
    facts: Facts = field(default_factory=dict)
    episode: EpisodeState | None = None

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model sampled."""
        return len(self.token_ids) if self.episode is None else sum(self.episode.sampled)

    def extended(self, part: Completion, *, max_tokens: int) -> OpenSample:
        """Return the response with a further part.

        Args:
            part: Completion that continues the response.
            max_tokens: Length at which a response ends.
        """
        token_ids = (*self.token_ids, *part.output_token_ids)
        is_over = part.finish_reason != "length" or len(token_ids) >= max_tokens
        return OpenSample(
            token_ids,
            (*self.logprobs, *part.output_logprobs),
            (*self.versions, *(part.weights_version for _ in part.output_token_ids)),
            part.finish_reason if is_over else None,
            (*self.segments, TurnSegment(part.request_id, part.sample_index)),
            join_facts((len(self.token_ids), self.facts), (len(part.output_token_ids), part.facts)),
        )


class GroupFacts(NamedTuple):
    """Facts of a group in flight that all ranks know.

    Args:
        request_id: Number of its prompt in the run.
        begun, complete: Rounds of its first and last token; 0 before there is one.
        num_tokens: Number of tokens sampled so far.
        num_forgotten: Number of tokens discarded when episodes started over.
    """

    request_id: int
    begun: int
    complete: int
    num_tokens: int
    num_forgotten: int = 0


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A prompt and its responses so far.

    Args:
        request_id: Number of the prompt in the run.
        prompt: The data row.
        samples: One open sample per response.
        logprobs_mode: Mode of the logprobs, as in `Completion`.
        begun, complete: Rounds of its first token, and of the last token of all responses; 0
            before there is one.
    """

    request_id: int
    prompt: Prompt
    samples: tuple[OpenSample, ...]
    logprobs_mode: LogprobsMode
    begun: int = 0
    complete: int = 0

    @property
    def facts(self) -> GroupFacts:
        """Facts that all ranks know."""
        num_tokens = sum(sample.num_sampled for sample in self.samples)
        states = (sample.episode for sample in self.samples)
        num_forgotten = sum(0 if each is None else each.num_forgotten for each in states)
        return GroupFacts(self.request_id, self.begun, self.complete, num_tokens, num_forgotten)

    def extended(self, index: int, sample: OpenSample, round_number: int) -> OpenGroup:
        """Return the group after a round that extended a response."""
        samples = (*self.samples[:index], sample, *self.samples[index + 1 :])
        is_complete = all(sample.finish_reason is not None for sample in samples)
        return replace(
            self,
            samples=samples,
            begun=self.begun or round_number,
            complete=round_number if is_complete else 0,
        )

    def completions(self) -> list[Completion]:
        """Return the finished responses as completions of the prompt."""
        return [
            Completion(
                request_id=self.request_id,
                sample_index=index,
                prompt_token_ids=self.prompt.token_ids,
                output_token_ids=sample.token_ids,
                output_logprobs=sample.logprobs,
                logprobs_mode=self.logprobs_mode,
                finish_reason=sample.finish_reason or "abort",
                weights_version=max(sample.versions, default=-1),
                facts=sample.facts,
            )
            for index, sample in enumerate(self.samples)
        ]


@dataclass(frozen=True, slots=True)
class StreamState:
    """State that streaming rollouts leave to the next round, on one rank.

    Args:
        groups: Groups of this rank by request id; those without tokens have not begun.
        num_calls: Number of engine calls so far; each has different random numbers.
        num_rounds: Number of rounds so far.
        entries: Entries of the engine's ledger for these groups.
        num_groups: Number of groups on all ranks.
        options: Options of the run that open responses depend on, as shown to the user.
    """

    groups: tuple[OpenGroup, ...] = ()
    num_calls: int = 0
    num_rounds: int = 0
    entries: tuple[LedgerEntry, ...] = ()
    num_groups: int = 0
    options: Mapping[str, str] = field(default_factory=dict)

    def with_entries(self, entries: Iterable[LedgerEntry]) -> StreamState:
        """Return a copy with the entries that belong to its groups."""
        calls = {
            (segment.request_id, segment.sample_index)
            for group in self.groups
            for sample in group.samples
            for segment in sample.segments
        }
        kept = (entry for entry in entries if entry.key[:2] in calls)
        return replace(self, entries=tuple(kept))


NOTHING_OPEN = StreamState()

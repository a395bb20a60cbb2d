"""State of partial rollouts: responses that are not finished yet, from step to step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cache
from typing import Self, cast, get_args, get_origin, get_type_hints

from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import LedgerEntry
from lightrft.engines.types import Completion, Facts, FinishReason, LogprobsMode
from lightrft.records.columns import join_facts
from lightrft.records.rollout import Segment


@dataclass(frozen=True, slots=True)
class OpenSample:
    """A response so far.

    Args:
        token_ids: Sampled so far.
        logprobs: fp32 logprob of each token under the weights that sampled it.
        versions: Version of those weights, for each token.
        finish_reason: None while it goes on.
        segments: The calls of the engine that sampled it.
        facts: As in `Completion`.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    segments: tuple[Segment, ...] = ()
    facts: Facts = field(default_factory=dict)

    def extended(self, part: Completion, *, max_tokens: int) -> OpenSample:
        """The response with a further part.

        Args:
            part: Sampled after it by the engine.
            max_tokens: Length at which a response ends.
        """
        token_ids = (*self.token_ids, *part.output_token_ids)
        is_over = part.finish_reason != "length" or len(token_ids) >= max_tokens
        return OpenSample(
            token_ids,
            (*self.logprobs, *part.output_logprobs),
            (*self.versions, *(part.weights_version for _ in part.output_token_ids)),
            part.finish_reason if is_over else None,
            (*self.segments, Segment(part.request_id, part.sample_index)),
            join_facts((len(self.token_ids), self.facts), (len(part.output_token_ids), part.facts)),
        )


@dataclass(frozen=True, slots=True)
class InFlightGroup:
    """A prompt and its responses so far.

    Args:
        request_id: Number of the prompt in the run.
        prompt: The data row.
        samples: One a response.
    """

    request_id: int
    prompt: Prompt
    samples: tuple[OpenSample, ...]

    @property
    def is_finished(self) -> bool:
        """Whether all responses are."""
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """Of the weights that sampled any of its tokens; None before the first."""
        return min((v for sample in self.samples for v in sample.versions), default=None)

    def completions(self, logprobs_mode: LogprobsMode) -> list[Completion]:
        """The finished responses as completions of the prompt."""
        return [
            Completion(
                request_id=self.request_id,
                sample_index=index,
                prompt_token_ids=self.prompt.token_ids,
                output_token_ids=sample.token_ids,
                output_logprobs=sample.logprobs,
                logprobs_mode=logprobs_mode,
                finish_reason=sample.finish_reason or "abort",
                weights_version=max(sample.versions, default=-1),
                facts=sample.facts,
            )
            for index, sample in enumerate(self.samples)
        ]


@dataclass(frozen=True, slots=True)
class PartialRolloutState:
    """State that a step leaves to the next one; the same on every rank.

    Args:
        groups: Ordered by request id; those without tokens have not begun.
        num_calls: Calls of the engine so far; each has random numbers of its own.
        weights_version: Of the engine during the step.
        entries: Of the engines' ledgers, on the groups that have begun.
    """

    groups: tuple[InFlightGroup, ...] = ()
    num_calls: int = 0
    weights_version: int = -1
    entries: tuple[LedgerEntry, ...] = ()

    def with_entries(self, entries: Iterable[LedgerEntry]) -> PartialRolloutState:
        """The same with those entries that belong to its groups."""
        calls = {
            (segment.request_id, segment.sample_index)
            for group in self.groups
            for sample in group.samples
            for segment in sample.segments
        }
        kept = (entry for entry in entries if entry.key[:2] in calls)
        return replace(self, entries=tuple(kept))

    def rebased(self, weights_version: int) -> PartialRolloutState:
        """The same for an engine that counts anew.

        Args:
            weights_version: Its version of the weights that followed those of the step.
        """
        if not self.groups:
            return self
        shift = weights_version - (self.weights_version + 1)
        groups = tuple(
            replace(
                group,
                samples=tuple(
                    replace(sample, versions=tuple(v + shift for v in sample.versions))
                    for sample in group.samples
                ),
            )
            for group in self.groups
        )
        entries = tuple(
            replace(entry, weights_version=entry.weights_version + shift) for entry in self.entries
        )
        return replace(self, groups=groups, weights_version=weights_version - 1, entries=entries)

    def to_json(self) -> str:
        """Text for a checkpoint."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: object) -> Self:
        """The state that `to_json` wrote.

        Raises:
            ValueError: The text is none of ours.
        """
        try:
            return cast("Self", _read(cls, json.loads(str(text))))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the checkpoint's unfinished responses cannot be read: {error!r}; start anew, or "
                "load it with load_module_only"
            ) from error


_hints = cache(get_type_hints)


def _read(kind: object, value: object) -> object:
    """The records, tuples and mappings that values of JSON stand for."""
    if is_dataclass(kind) and isinstance(kind, type):
        types, given = _hints(kind), cast("dict[str, object]", value)
        # Prompts of earlier checkpoints list images and videos apart; carried ones have none.
        return kind(**{n: _read(types[n], each) for n, each in given.items() if n in types})
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], each) for each in cast("list[object]", value))
    if get_origin(kind) is Mapping:
        given = cast("dict[str, object]", value)
        return {name: _read(get_args(kind)[1], each) for name, each in given.items()}
    return value

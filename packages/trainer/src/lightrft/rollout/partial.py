"""Partial rollouts: a step trains on the responses that are finished and carries the others over.

More prompts are in flight than a step trains on. They are continued in chunks of tokens until
enough groups are finished; the rest goes on in the next step under its new weights. Each token
keeps the logprob and the version of the weights that sampled it.

Source: Kimi Team 2025 (k1.5), arXiv:2501.12599, sec. 2.6.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cache
from typing import Self, cast, get_args, get_origin, get_type_hints

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import LedgerEntry
from lightrft.engines.types import (
    Completion,
    Facts,
    FinishReason,
    GenerationRequest,
    LogprobsMode,
    SamplingParams,
)
from lightrft.records.columns import join_facts
from lightrft.records.rollout import Segment
from lightrft.strategy.strategy_base import StrategyBase

# Every call of the engine draws under a seed of its own.
_SEED_STEP = 2_000_003


@dataclass(frozen=True, slots=True)
class OpenSample:
    """A response so far.

    Args:
        token_ids: What was sampled.
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
            part: What the engine sampled after it.
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
    """What a step leaves to the next one; the same on every rank.

    Args:
        groups: Ordered by request id; those without tokens have not begun.
        num_calls: Calls of the engine so far; each has random numbers of its own.
        weights_version: Of the engine during the step.
        entries: What the engines' ledgers say about the groups that have begun.
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
        """What `to_json` gave.

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
        return kind(**{name: _read(types[name], each) for name, each in given.items()})
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], each) for each in cast("list[object]", value))
    if get_origin(kind) is Mapping:
        given = cast("dict[str, object]", value)
        return {name: _read(get_args(kind)[1], each) for name, each in given.items()}
    return value


@dataclass(frozen=True, slots=True)
class PartialReport:
    """What a step sampled, finished and left.

    Args:
        carry: For the next step.
        version: Of the weights of this step.
        num_chunks: Calls of the engine.
        num_sampled_tokens: Sampled in this step, over all ranks.
        num_carried: Groups that have begun and go on.
        num_carried_tokens: Tokens that they have.
    """

    carry: PartialRolloutState
    version: int
    num_chunks: int
    num_sampled_tokens: int
    num_carried: int
    num_carried_tokens: int


def open_groups(
    prompts: Sequence[Prompt], *, first_request_id: int, group_size: int, strategy: StrategyBase
) -> list[InFlightGroup]:
    """The prompts of all ranks as groups without tokens, in global order; collective.

    Args:
        prompts: This rank's; every rank has equally many.
        first_request_id: Of the first prompt over all ranks.
        group_size: Responses of each.
        strategy: Gathers the prompts.
    """
    shares: list[list[Prompt]] = strategy.gather_objects(list(prompts))
    distributed = [share[i] for i in range(len(prompts)) for share in shares]
    empty = (OpenSample(),) * group_size
    return [
        InFlightGroup(first_request_id + i, prompt, empty) for i, prompt in enumerate(distributed)
    ]


def finish_groups(
    carry: PartialRolloutState,
    num_wanted: int,
    *,
    config: TrainConfig,
    sampling_params: SamplingParams,
    strategy: StrategyBase,
) -> tuple[list[InFlightGroup], PartialReport]:
    """Continues what is in flight until enough groups are finished; collective.

    Groups whose oldest token is `max_staleness` updates old are trained on in this step, so they
    are waited for. Of the others, those with the oldest tokens come first.

    Args:
        carry: All groups, those of this step's prompts included; the same on every rank.
        num_wanted: Groups that a step trains on.
        config: How many prompts are in flight, and how old their tokens may become.
        sampling_params: Of whole responses; `max_tokens` is the longest.
        strategy: Generates.

    Returns:
        The groups to train on, the same on every rank, and what became of the others.

    Raises:
        ValueError: There are fewer groups than wanted, or no engine.
    """
    engine = strategy.inference_engine
    if engine is None or len(carry.groups) < num_wanted:
        raise ValueError(
            f"partial rollouts need an engine and {num_wanted} prompts or more: got "
            f"{len(carry.groups)}"
        )
    version = engine.weights_version
    flight = {group.request_id: group for group in carry.groups[: config.num_prompts_in_flight]}
    due = _overdue(flight, version - config.max_staleness)
    num_calls, num_before = carry.num_calls, _num_tokens(flight.values())
    chunk = min(config.tokens_per_chunk, sampling_params.max_tokens)
    while not _is_enough(flight, due, num_wanted):
        num_calls += 1
        seed = sampling_params.seed + _SEED_STEP * num_calls
        params = replace(sampling_params, n=1, max_tokens=chunk, seed=seed)
        flight = _continue(flight, params, sampling_params.max_tokens, strategy)
    chosen = sorted(
        (group for group in flight.values() if group.is_finished),
        key=lambda group: (group.request_id not in due, group.oldest_version, group.request_id),
    )[:num_wanted]
    kept = {group.request_id for group in chosen}
    left = [flight.get(g.request_id, g) for g in carry.groups if g.request_id not in kept]
    begun = [group for group in left if group.oldest_version is not None]
    return chosen, PartialReport(
        carry=PartialRolloutState(tuple(left), num_calls, version),
        version=version,
        num_chunks=num_calls - carry.num_calls,
        num_sampled_tokens=_num_tokens(flight.values()) - num_before,
        num_carried=len(begun),
        num_carried_tokens=_num_tokens(begun),
    )


def _overdue(flight: dict[int, InFlightGroup], version: int) -> set[int]:
    """Groups that hold a token of this version or an older one."""
    return {
        key
        for key, group in flight.items()
        if group.oldest_version is not None and group.oldest_version <= version
    }


def _is_enough(flight: dict[int, InFlightGroup], due: set[int], num_wanted: int) -> bool:
    num_finished = sum(group.is_finished for group in flight.values())
    return num_finished >= num_wanted and all(flight[key].is_finished for key in due)


def _num_tokens(groups: Iterable[InFlightGroup]) -> int:
    return sum(len(sample.token_ids) for group in groups for sample in group.samples)


def _continue(
    flight: dict[int, InFlightGroup],
    params: SamplingParams,
    max_tokens: int,
    strategy: StrategyBase,
) -> dict[int, InFlightGroup]:
    """Every unfinished response with one more chunk; distributed over ranks evenly."""
    places = [
        (key, index)
        for key, group in flight.items()
        for index, sample in enumerate(group.samples)
        if sample.finish_reason is None
    ]
    own = places[strategy.get_rank() :: strategy.world_size]
    requests = []
    for key, index in own:
        group, sample = flight[key], flight[key].samples[index]
        requests.append(
            GenerationRequest(
                prompt_token_ids=(*group.prompt.token_ids, *sample.token_ids),
                request_id=group.request_id * len(group.samples) + index,
                max_tokens=min(params.max_tokens, max_tokens - len(sample.token_ids)),
            )
        )
    parts: list[Completion] = strategy.gather_and_generate(params, requests, sleep_engine=False)
    # Every rank knows the contexts.
    found = {
        place: replace(part, prompt_token_ids=()) for place, part in zip(own, parts, strict=True)
    }
    everything: dict[tuple[int, int], Completion] = {}
    for share in strategy.gather_objects(found):
        everything |= share
    return {
        key: replace(
            group,
            samples=tuple(
                sample.extended(everything[key, index], max_tokens=max_tokens)
                if (key, index) in everything
                else sample
                for index, sample in enumerate(group.samples)
            ),
        )
        for key, group in flight.items()
    }

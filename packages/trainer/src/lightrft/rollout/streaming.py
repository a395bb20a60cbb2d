"""Streaming rollouts: no step waits for its longest response.

More prompts are in flight than a step trains on. In each round, one of every step, every open
response samples up to `stream_chunk` further tokens under the present weights; whole groups are
trained, the others stay on their rank. What is sampled depends on tokens and rounds, never on time:
an open response has min(its length, stream_chunk x the rounds since its first) tokens, of an
episode those that the model samples, and fewer where `tool_lag` lets it wait. Groups are trained in
the order of (round in which they were complete, request id); none is dropped. A group that would
become older than `max_staleness` rounds is waited for, and so are the oldest ones where too few are
whole.

Source: Kimi Team 2025 (k1.5), arXiv:2501.12599, sec. 2.6.2; rounds and bounds are our own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from lightrft.config import ConfigError, EnvironmentOptions, RolloutOptions
from lightrft.datasets.types import Prompt
from lightrft.engines.types import SamplingParams
from lightrft.rollout.open_groups import OpenGroup, StreamState
from lightrft.rollout.open_turns import OpenTurns, ResponsePart
from lightrft.rollout.single_turn import turn_source
from lightrft.rollout.source import SampleRequests, Samples, SourceParts, StreamReport


@dataclass(frozen=True, slots=True, order=True)
class GroupFacts:
    """Facts of a group in flight that all ranks know.

    Args:
        request_id: Number of its prompt in the run.
        begun, complete: Rounds of its first and of its last token; 0 is not yet.
        num_tokens: Sampled so far.
        num_forgotten: Sampled beside them, by episodes that then started over.
    """

    request_id: int
    begun: int
    complete: int
    num_tokens: int
    num_forgotten: int = 0


def groups_to_train(
    groups: Sequence[GroupFacts], num_wanted: int, *, round_number: int, max_staleness: int
) -> list[GroupFacts]:
    """The groups that a round trains on, in the order of (complete, request id), open ones last.

    Those that are not complete have to be waited for. Every group is trained within
    `max_staleness` rounds after it has begun, as long as at most (max_staleness + 1) num_wanted
    groups are in flight: of the n that are due within j rounds, n - j num_wanted are taken now.

    Args:
        groups: That have begun.
        num_wanted: Groups that a step trains on.
        round_number, max_staleness: This round, and how many may pass.
    """
    by_age = sorted(groups, key=lambda each: (each.begun, each.request_id))
    num_due = [
        sum(each.begun + max_staleness <= round_number + later for each in by_age)
        - later * num_wanted
        for later in range(max_staleness + 1)
    ]
    required = by_age[: max(0, *num_due)]
    taken = {each.request_id for each in required}
    rest = [each for each in by_age if each.request_id not in taken]
    whole = sorted((each for each in rest if each.complete), key=in_order)
    still_open = [each for each in rest if not each.complete]
    return sorted([*required, *whole, *still_open][:num_wanted], key=in_order)


def in_order(group: GroupFacts) -> tuple[bool, int, int]:
    """The key by which groups are trained in order."""
    return not group.complete, group.complete, group.request_id


class OpenResponses(Protocol):
    """Open responses, of one turn or episodes: how they begin, go on and are handed over."""

    def begin(self, request_id: int, prompt: Prompt, params: SamplingParams) -> OpenGroup:
        """A group without tokens."""
        ...

    def extended(self, groups: Sequence[OpenGroup], part: ResponsePart) -> list[OpenGroup]:
        """This rank's groups after a part; collective."""
        ...

    def finished(
        self, groups: Sequence[OpenGroup], group_ids: Sequence[int], requests: SampleRequests
    ) -> Samples:
        """Complete groups as scored samples; collective."""
        ...


class StreamSource:
    """Source of the groups that are complete first; the others are its state.

    Args:
        parts: Of the run.
        responses: What is sampled; None is responses of one turn.
    """

    def __init__(self, parts: SourceParts, responses: OpenResponses | None = None) -> None:
        self._parts, self._responses = parts, responses or OpenTurns(parts)

    def sample(self, requests: SampleRequests) -> Samples:
        """See `RolloutSource`.

        Raises:
            ConfigError: Responses are open that began under other options.
        """
        parts = self._parts
        options = _fixed_options(parts.config)
        if requests.stream.num_groups:
            _require_same(requests.stream.options, options)
        with requests.timer.stage("rollout"), requests.recording(parts):
            flight = _Flight(parts, requests, self._responses)
            num_prompts, before = flight.admit(), flight.num_sampled
            flight.sample_round()
            order, num_waited = flight.finish_chosen()
        first = requests.positions.start - parts.context.rank
        places = {request_id: first + i for i, request_id in enumerate(order)}
        asked = [group for group in flight.own if group.request_id in places]
        group_ids = [places[group.request_id] for group in asked]
        samples = self._responses.finished(asked, group_ids, requests)
        left = tuple(group for group in flight.own if group.request_id not in places)
        state = StreamState(left, flight.num_calls, flight.round_number, options=options)
        state = replace(state, num_groups=len(flight.facts) - len(order))
        if samples.evidence is not None:
            state = state.with_entries(samples.evidence.entries.values())
        still_open = [each for each in flight.begun() if each.request_id not in places]
        report = StreamReport(
            num_sampled_tokens=flight.num_sampled - before,
            num_open=len(still_open),
            num_open_tokens=sum(each.num_tokens for each in still_open),
            num_waited=num_waited,
        )
        return replace(samples, num_prompts=num_prompts, stream=state, report=report)


def _fixed_options(config: RolloutOptions) -> dict[str, str]:
    """Those whose other values would not have let open responses come to where they are."""
    values = {
        "n_samples_per_prompt": config.n_samples_per_prompt,
        "generate_max_len": config.generate_max_len,
        "prompt_max_len": config.prompt_max_len,
        "max_len": config.max_len,
        "max_turns": config.max_turns,
        "max_observation_tokens": config.max_observation_tokens,
        "environment and tools": _names_of(config),
    }
    return {name: str(value) for name, value in values.items()}


def _names_of(config: EnvironmentOptions) -> str:
    """Classes and functions, whose files may have moved."""
    given = (() if config.environment is None else (config.environment,)) + config.tools
    return ", ".join(each.rpartition(":")[2] for each in given) or "none"


def _require_same(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    # Checkpoints of older versions, whose responses have one turn, do not say.
    known = before.keys() & now
    changes = [f"{n}: {before[n]} -> {now[n]}" for n in sorted(known) if before[n] != now[n]]
    if changes:
        raise ConfigError(
            f"the checkpoint has open responses (stream_chunk), and {', '.join(changes)}: give "
            "the old values, or another --output_dir to start anew"
        )


class _Flight:
    """The groups in flight in one round: those of this rank, and facts of all."""

    def __init__(
        self, parts: SourceParts, requests: SampleRequests, responses: OpenResponses
    ) -> None:
        state = requests.stream
        self._parts, self._requests, self._responses = parts, requests, responses
        self.own, self.num_calls = list(state.groups), state.num_calls
        self.round_number = state.num_rounds + 1
        self.facts: list[GroupFacts] = []

    def admit(self) -> int:
        """Opens groups of as many prompts as may be in flight; returns how many; collective.

        Raises:
            ValueError: They are fewer than a step trains on.
        """
        requests, params = self._requests, self._requests.params
        wanted, prompts = self._parts.config.num_prompts_in_flight, requests.prompts
        num_new = 0
        while True:
            if prompts:  # on all ranks or on none
                for prompt, i in zip(prompts, requests.request_ids, strict=True):
                    self.own.append(self._responses.begin(i + num_new, prompt, params))
                num_new += requests.num_prompts
            self._tell()
            num_then = len(self.facts) + requests.num_prompts
            is_last = requests.most_groups is not None and num_then > requests.most_groups
            if is_last or requests.next_prompts is None or len(self.facts) >= wanted:
                break
            prompts = requests.next_prompts()
        if len(self.facts) < requests.num_prompts:
            raise ValueError(
                f"streaming rollouts need {requests.num_prompts} prompts or more: got "
                f"{len(self.facts)}"
            )
        return num_new

    def sample_round(self) -> None:
        """A chunk for each response of the groups that may be in flight; collective."""
        config, params = self._parts.config, self._requests.params
        active = sorted(self.facts)[: config.num_prompts_in_flight]
        chunk = config.stream_chunk or params.max_tokens
        hot = turn_source(config).first_temperature(config, self._requests.prompts)
        if hot is not None:
            self._extend({each.request_id: 1 for each in active}, replace(params, temperature=hot))
        ages = {e.request_id: self.round_number - (e.begun or self.round_number) for e in active}
        self._extend({i: chunk * (age + 1) for i, age in ages.items()}, params)
        self._tell()

    def finish_chosen(self) -> tuple[list[int], int]:
        """Request ids of the groups to train on, in order, and how many were waited for.

        Collective: these are sampled to their ends.
        """
        requests, config = self._requests, self._parts.config
        chosen = groups_to_train(
            self.begun(),
            requests.num_prompts,
            round_number=self.round_number,
            max_staleness=config.max_staleness,
        )
        waited = [each.request_id for each in chosen if not each.complete]
        self._extend(dict.fromkeys(waited), requests.params)
        self._tell()
        ids = {each.request_id for each in chosen}
        order = sorted((each for each in self.facts if each.request_id in ids), key=in_order)
        return [each.request_id for each in order], len(waited)

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled for all groups in flight."""
        return sum(each.num_tokens + each.num_forgotten for each in self.facts)

    def begun(self) -> list[GroupFacts]:
        """Facts of the groups that have begun."""
        return [each for each in self.facts if each.begun]

    def _extend(self, lengths: Mapping[int, int | None], params: SamplingParams) -> None:
        """A part for some groups; see `ResponsePart`."""
        self.num_calls += 1
        part = ResponsePart(lengths, params, self.round_number, self.num_calls)
        self.own = self._responses.extended(self.own, part)

    def _tell(self) -> None:
        """Tells all ranks of the groups of this one, in 20 bytes each; collective."""
        own = np.array([each.facts for each in self.own], np.int32).reshape(-1, 5)
        told = self._parts.context.gather_bytes(own.tobytes())
        rows = (np.frombuffer(data, np.int32).reshape(-1, 5).tolist() for data in told)
        self.facts = [GroupFacts(*row) for part in rows for row in part]

"""Streaming rollouts: no step waits for its longest response.

More prompts are in flight than a step trains on. Each step has one round, in which every open
response samples up to `stream_chunk` further tokens under the current weights. Complete groups are
trained; the others stay on their rank. Samples depend on tokens and rounds, never on time. An open
response has min(its length, stream_chunk x the rounds since its first) tokens. In an episode, only
tokens that the model samples count, and there are fewer while it waits under `tool_lag`. Groups are
trained in the order of (round of completion, request id), and none is dropped. A step waits for
groups that would otherwise become older than `max_staleness` rounds. If too few groups are
complete, it also waits for the oldest ones.

Source: Kimi Team 2025 (k1.5), arXiv:2501.12599, sec. 2.6.2; rounds and bounds are not from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from lightrft.config import ConfigError, EnvironmentOptions, RolloutOptions
from lightrft.datasets.types import Prompt
from lightrft.engines.types import SamplingParams
from lightrft.rollout.open_groups import GroupFacts, OpenGroup, StreamState
from lightrft.rollout.open_turns import OpenTurns, ResponsePart
from lightrft.rollout.single_turn import turn_source
from lightrft.rollout.source import SampleRequests, Samples, SourceParts, StreamReport


def groups_to_train(
    groups: Sequence[GroupFacts], num_wanted: int, *, round_number: int, max_staleness: int
) -> list[GroupFacts]:
    """Return the groups that a round trains on, sorted by (complete, request id), open ones last.

    The round must wait for open groups. Every group is trained within `max_staleness` rounds after
    its start, as long as at most (max_staleness + 1) num_wanted groups are in flight: of the n
    groups due within j rounds, n - j num_wanted are taken now.

    Args:
        groups: Groups that have begun.
        num_wanted: Number of groups that a step trains on.
        round_number, max_staleness: This round, and the maximum age of a group in rounds.
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
    """Return the sort key of groups in training order."""
    return not group.complete, group.complete, group.request_id


class OpenResponses(Protocol):
    """Operations on open responses, of single turns or episodes: begin, extend, finish."""

    def begin(self, request_id: int, prompt: Prompt, params: SamplingParams) -> OpenGroup:
        """Return a group without tokens."""
        ...

    def extended(self, groups: Sequence[OpenGroup], part: ResponsePart) -> list[OpenGroup]:
        """Sample a part and return this rank's groups with it; collective."""
        ...

    def finished(
        self, groups: Sequence[OpenGroup], group_ids: Sequence[int], requests: SampleRequests
    ) -> Samples:
        """Return complete groups as scored samples; collective."""
        ...


class StreamSource:
    """Source that returns complete groups first and keeps open ones as its state.

    Args:
        parts: Parts of the run.
        responses: Operations on open responses; None samples single turns.
    """

    def __init__(self, parts: SourceParts, responses: OpenResponses | None = None) -> None:
        self._parts, self._responses = parts, responses or OpenTurns(parts)

    def sample(self, requests: SampleRequests) -> Samples:
        """Sample one round and return its complete groups.

        Raises:
            ConfigError: Open responses began under other options.
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
    """Return the options that must not change while responses are open."""
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
    """Return names of classes and functions without their files, which may have moved."""
    references = (() if config.environment is None else (config.environment,)) + config.tools
    return ", ".join(each.rpartition(":")[2] for each in references) or "none"


def _require_same(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    # Older checkpoints, which have single turns only, lack some options.
    known = before.keys() & now
    changes = [f"{n}: {before[n]} -> {now[n]}" for n in sorted(known) if before[n] != now[n]]
    if changes:
        raise ConfigError(
            f"the checkpoint has open responses (stream_chunk), and {', '.join(changes)}: give "
            "the old values, or another --output_dir to start anew"
        )


class _Flight:
    """Groups in flight in one round: this rank's groups, and facts of all groups."""

    def __init__(
        self, parts: SourceParts, requests: SampleRequests, responses: OpenResponses
    ) -> None:
        state = requests.stream
        self._parts, self._requests, self._responses = parts, requests, responses
        self.own, self.num_calls = list(state.groups), state.num_calls
        self.round_number = state.num_rounds + 1
        self.facts: list[GroupFacts] = []

    def admit(self) -> int:
        """Open groups until enough prompts are in flight; return their number; collective.

        Raises:
            ValueError: There are fewer groups than a step trains on.
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
        """Sample a chunk for each response of the active groups; collective."""
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
        """Finish the groups to train on; return their request ids in order.

        Collective. Also return the number of groups that were still open.
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
        """Number of tokens sampled for all groups in flight."""
        return sum(each.num_tokens + each.num_forgotten for each in self.facts)

    def begun(self) -> list[GroupFacts]:
        """Return the facts of groups that have begun."""
        return [each for each in self.facts if each.begun]

    def _extend(self, lengths: Mapping[int, int | None], params: SamplingParams) -> None:
        """Sample a `ResponsePart` for some groups."""
        self.num_calls += 1
        part = ResponsePart(lengths, params, self.round_number, self.num_calls)
        self.own = self._responses.extended(self.own, part)

    def _tell(self) -> None:
        """Exchange facts of groups between all ranks, 20 bytes per group; collective."""
        facts = np.array([each.facts for each in self.own], np.int32).reshape(-1, 5)
        facts_by_rank = self._parts.context.gather_bytes(facts.tobytes())
        rows = (np.frombuffer(data, np.int32).reshape(-1, 5).tolist() for data in facts_by_rank)
        self.facts = [GroupFacts(*row) for part in rows for row in part]

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

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lightrft.config import ConfigError, EnvironmentOptions, RolloutOptions
from lightrft.datasets.types import Prompt
from lightrft.engines.types import GenerationRequest, SamplingParams
from lightrft.records.media import media_request
from lightrft.records.rollout import Rollout
from lightrft.rewards.types import RewardResult
from lightrft.rollout.open_groups import GroupFacts, OpenGroup, OpenSample, StreamState
from lightrft.rollout.scoring import finished_samples, open_scorer
from lightrft.rollout.single_turn import RolloutGroups, generate, turn_source
from lightrft.rollout.source import SampleRequests, Samples, SourceParts, StreamReport

# Every engine call of open single-turn responses uses a different seed.
_SEED_STEP = 2_000_003
# A response: its group, and its index in the group.
Place = tuple[OpenGroup, int]


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


@dataclass(frozen=True, slots=True)
class ResponsePart:
    """A part of open responses that is sampled at once.

    Args:
        lengths: Number of tokens to which each response may grow, by request id of the active
            groups; None samples it to its end.
        params: Sampling parameters of whole responses.
        round_number: Round in which the part is sampled.
        number: Index of the part in the run.
    """

    lengths: Mapping[int, int | None]
    params: SamplingParams
    round_number: int
    number: int

    def takes(self, group: OpenGroup, sample: OpenSample) -> bool:
        """Return whether a response of a group is sampled in this part."""
        if group.request_id not in self.lengths or sample.finish_reason is not None:
            return False
        most, state = self.lengths[group.request_id], sample.episode
        is_scheduled = state is None or state.due <= self.round_number
        return most is None or (is_scheduled and sample.num_sampled < most)


class OpenResponses(Protocol):
    """Operations on open responses, of single turns or episodes: begin, extend, finish.

    Attributes:
        special_ids: Token ids that the text of an observation must not contain.
        tool_names: Names of the available tools, or None without environments and tools.
    """

    special_ids: frozenset[int]
    tool_names: tuple[str, ...] | None

    def begin(self, sample_id: int) -> OpenSample:
        """Return a response without tokens."""
        ...

    def extended(
        self, groups: Sequence[OpenGroup], places: Sequence[Place], part: ResponsePart
    ) -> list[OpenSample]:
        """Sample a part of some responses and return them with it; collective.

        Args:
            groups: Groups of this rank.
            places: Responses that the part takes.
            part: The part.
        """
        ...

    def finished(
        self, group: OpenGroup, group_id: int, requests: SampleRequests
    ) -> tuple[list[Rollout], list[RewardResult | None]]:
        """Return a complete group, and the rewards of its environments if it has them."""
        ...


class OpenTurns:
    """Open single-turn responses; see `OpenResponses`.

    Args:
        parts: Parts of the run.
    """

    special_ids: frozenset[int] = frozenset()
    tool_names: tuple[str, ...] | None = None

    def __init__(self, parts: SourceParts) -> None:
        self._parts = parts

    def begin(self, sample_id: int) -> OpenSample:
        """Return a response without tokens."""
        return OpenSample()

    def extended(
        self, groups: Sequence[OpenGroup], places: Sequence[Place], part: ResponsePart
    ) -> list[OpenSample]:
        """Sample a part with one engine call and return the responses with it.

        Raises:
            ValueError: The groups belong to episodes.
        """
        if any(sample.episode is not None for group in groups for sample in group.samples):
            raise ValueError(
                "this checkpoint has unfinished episodes: start with their --environment"
            )
        params = part.params
        bound = params.max_tokens
        most = {i: min(length or bound, bound) for i, length in part.lengths.items()}
        asked = [self._request(group, index, most[group.request_id]) for group, index in places]
        call = replace(params, n=1, seed=params.seed + _SEED_STEP * part.number)
        sampled = generate(self._parts.session, call, asked)
        return [
            group.samples[index].extended(more, max_tokens=bound)
            for (group, index), more in zip(places, sampled, strict=True)
        ]

    def _request(self, group: OpenGroup, index: int, length: int) -> GenerationRequest:
        """Return the request that continues a response of a group up to a length."""
        request_id = group.request_id * len(group.samples) + index
        prompt, begun = group.prompt, group.samples[index].token_ids
        media = media_request(prompt, request_id, self._parts.encoder).encoded
        return GenerationRequest(
            prompt_token_ids=(*prompt.token_ids, *begun),
            request_id=request_id,
            max_tokens=length - len(begun),
            encoded=media and media.continued(begun),
        )

    def finished(
        self, group: OpenGroup, group_id: int, requests: SampleRequests
    ) -> tuple[list[Rollout], list[RewardResult | None]]:
        """Return a complete group, without rewards of environments."""
        rollouts = RolloutGroups(
            [group.prompt],
            [group.request_id],
            group_ids=[group_id],
            group_size=len(group.samples),
            decoder=self._parts.decoder,
        ).in_order(group.completions())
        pairs = zip(rollouts, group.samples, strict=True)
        finished = [
            replace(rollout, token_versions=sample.versions, segments=sample.segments)
            for rollout, sample in pairs
        ]
        return finished, []


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
        asked = [group for group in flight.groups if group.request_id in places]
        group_ids = [places[group.request_id] for group in asked]
        samples = self._finished(asked, group_ids, requests)
        left = tuple(group for group in flight.groups if group.request_id not in places)
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

    def _finished(
        self, groups: Sequence[OpenGroup], group_ids: Sequence[int], requests: SampleRequests
    ) -> Samples:
        """Return complete groups as scored samples; collective."""
        prompts, ids = [group.prompt for group in groups], [group.request_id for group in groups]
        requests.ledger.ask(prompts, group_ids, requests.params.n, ids)
        pairs = zip(groups, group_ids, strict=True)
        played = [self._responses.finished(*pair, requests) for pair in pairs]
        samples = finished_samples(
            self._parts,
            requests,
            [rollout for rollouts, _ in played for rollout in rollouts],
            scorer=open_scorer(self._parts, replace(requests, prompts=prompts)),
            environment_results=[result for _, results in played for result in results],
            special_ids=self._responses.special_ids,
            carried=requests.stream.entries,
        )
        return replace(samples, tool_names=self._responses.tool_names)


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
        self.groups, self.num_calls = list(state.groups), state.num_calls
        self.round_number = state.num_rounds + 1
        self.facts: list[GroupFacts] = []

    def admit(self) -> int:
        """Open groups until enough prompts are in flight; return their number; collective.

        Raises:
            ValueError: There are fewer groups than a step trains on.
        """
        requests = self._requests
        wanted, prompts = self._parts.config.num_prompts_in_flight, requests.prompts
        num_new = 0
        while True:
            if prompts:  # on all ranks or on none
                for prompt, i in zip(prompts, requests.request_ids, strict=True):
                    self.groups.append(self._begin(prompt, i + num_new))
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
        hot = turn_source(config.use_fire).first_temperature(config, self._requests.prompts)
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

    def _begin(self, prompt: Prompt, request_id: int) -> OpenGroup:
        params = self._requests.params
        sample_ids = range(request_id * params.n, (request_id + 1) * params.n)
        samples = tuple(map(self._responses.begin, sample_ids))
        return OpenGroup(request_id, prompt, samples, params.logprobs_mode)

    def _extend(self, lengths: Mapping[int, int | None], params: SamplingParams) -> None:
        """Sample a `ResponsePart` for some groups."""
        self.num_calls += 1
        part = ResponsePart(lengths, params, self.round_number, self.num_calls)
        places = [
            (group, index)
            for group in self.groups
            for index, sample in enumerate(group.samples)
            if part.takes(group, sample)
        ]
        extended = self._responses.extended(self.groups, places, part)
        by_id = {group.request_id: group for group in self.groups}
        for (group, index), sample in zip(places, extended, strict=True):
            before = by_id[group.request_id]
            by_id[group.request_id] = before.extended(index, sample, self.round_number)
        self.groups = list(by_id.values())

    def _tell(self) -> None:
        """Exchange facts of groups between all ranks; collective."""
        everyone = self._parts.context.gather_objects([group.facts for group in self.groups])
        self.facts = [facts for part in everyone for facts in part]

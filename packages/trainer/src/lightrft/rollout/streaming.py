"""Streaming rollouts: no step waits for its longest response.

More prompts are in flight than a step trains on. In each round, one of every step, every open
response samples up to `stream_chunk` further tokens under the present weights; whole groups are
trained, the others stay on their rank. What is sampled depends on tokens and rounds, never on time:
an open response has min(its length, stream_chunk x the rounds since its first) tokens. Groups are
trained in the order of (round in which they were complete, request id); none is dropped. A group
that would become older than `max_staleness` rounds is waited for, and so are the oldest ones where
too few are whole.

Source: Kimi Team 2025 (k1.5), arXiv:2501.12599, sec. 2.6.2; rounds and bounds are our own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lightrft.engines.media.encoder import Encoder
from lightrft.engines.types import GenerationRequest, SamplingParams
from lightrft.records.media import media_request, require_text
from lightrft.records.rollout import Rollout
from lightrft.rollout.scoring import finished_samples, open_scorer
from lightrft.rollout.single_turn import RolloutGroups, generate
from lightrft.rollout.source import (
    OpenGroup,
    OpenSample,
    SampleRequests,
    Samples,
    SourceParts,
    StreamReport,
    StreamState,
)
from lightrft.rollout.stream_order import GroupFacts, groups_to_train, in_order

# Every call of the engine draws under a seed of its own.
_SEED_STEP = 2_000_003


class StreamSource:
    """Source of the groups that are complete first; the others are its state.

    Args:
        parts: Of the run.
    """

    def __init__(self, parts: SourceParts) -> None:
        self._parts = parts

    def sample(self, requests: SampleRequests) -> Samples:
        """See `RolloutSource`."""
        parts = self._parts
        if parts.config.use_fire:
            require_text(requests.prompts, "use_fire")
        with requests.timer.stage("rollout"), requests.recording(parts):
            flight = _Flight(parts, requests)
            num_prompts, before = flight.admit(), flight.num_tokens
            flight.sample_round()
            order, num_waited = flight.finish_chosen()
        first = requests.positions.start - parts.context.rank
        places = {request_id: first + i for i, request_id in enumerate(order)}
        asked = [group for group in flight.own if group.request_id in places]
        samples = self._scored(asked, [places[group.request_id] for group in asked], requests)
        left = tuple(group for group in flight.own if group.request_id not in places)
        state = StreamState(left, flight.num_calls, flight.round_number)
        state = replace(state, num_groups=len(flight.facts) - len(order))
        if samples.evidence is not None:
            state = state.with_entries(samples.evidence.entries.values())
        still_open = [each for each in flight.begun() if each.request_id not in places]
        report = StreamReport(
            num_sampled_tokens=flight.num_tokens - before,
            num_open=len(still_open),
            num_open_tokens=sum(each.num_tokens for each in still_open),
            num_waited=num_waited,
        )
        return replace(samples, num_prompts=num_prompts, stream=state, report=report)

    def _scored(
        self, groups: Sequence[OpenGroup], group_ids: Sequence[int], requests: SampleRequests
    ) -> Samples:
        prompts, ids = [group.prompt for group in groups], [group.request_id for group in groups]
        requests.ledger.ask(prompts, group_ids, requests.params.n, ids)
        pairs = zip(groups, group_ids, strict=True)
        return finished_samples(
            self._parts,
            requests,
            [item for group, i in pairs for item in self._rollouts(group, i)],
            scorer=open_scorer(self._parts, replace(requests, prompts=prompts)),
            carried=requests.stream.entries,
        )

    def _rollouts(self, group: OpenGroup, group_id: int) -> list[Rollout]:
        rollouts = RolloutGroups(
            [group.prompt],
            [group.request_id],
            group_ids=[group_id],
            group_size=len(group.samples),
            decoder=self._parts.decoder,
        ).in_order(group.completions())
        return [
            replace(item, token_versions=sample.versions, segments=sample.segments)
            for item, sample in zip(rollouts, group.samples, strict=True)
        ]


class _Flight:
    """The groups in flight in one round: those of this rank, and facts of all."""

    def __init__(self, parts: SourceParts, requests: SampleRequests) -> None:
        state = requests.stream
        self._parts, self._requests = parts, requests
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
                    empty = (OpenSample(),) * params.n
                    self.own.append(OpenGroup(i + num_new, prompt, empty, params.logprobs_mode))
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
        active = {each.request_id for each in sorted(self.facts)[: config.num_prompts_in_flight]}
        chunk = config.stream_chunk or params.max_tokens
        if config.use_fire:
            hot = replace(params, temperature=config.first_token_temperature)
            self._call(active, hot, lambda _: 1)
        self._call(active, params, lambda begun: chunk * (self.round_number - begun + 1))
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
        waited = {each.request_id for each in chosen if not each.complete}
        self._call(waited, requests.params, lambda _: requests.params.max_tokens)
        self._tell()
        ids = {each.request_id for each in chosen}
        order = sorted((each for each in self.facts if each.request_id in ids), key=in_order)
        return [each.request_id for each in order], len(waited)

    @property
    def num_tokens(self) -> int:
        """Of all groups in flight."""
        return sum(each.num_tokens for each in self.facts)

    def begun(self) -> list[GroupFacts]:
        """Facts of the groups that have begun."""
        return [each for each in self.facts if each.begun]

    def _call(
        self, request_ids: set[int], params: SamplingParams, length: Callable[[int], int]
    ) -> None:
        """One call of the engine.

        Args:
            request_ids: Groups that take part.
            params: Of whole responses.
            length: Up to which a response of a group that began in some round may grow.
        """
        self.num_calls += 1
        places, asked = [], []
        for index, group in enumerate(self.own):
            most = min(length(group.begun or self.round_number), params.max_tokens)
            for number, sample in enumerate(group.samples):
                left = most - len(sample.token_ids)
                is_open = group.request_id in request_ids and sample.finish_reason is None
                if is_open and left > 0:
                    places.append((index, number))
                    asked.append(_request(group, number, left, self._parts.encoder))
        call = replace(params, n=1, seed=params.seed + _SEED_STEP * self.num_calls)
        found = generate(self._parts.session, call, asked)
        for (index, number), part in zip(places, found, strict=True):
            group = self.own[index]
            samples = list(group.samples)
            samples[number] = samples[number].extended(part, max_tokens=params.max_tokens)
            is_complete = all(sample.finish_reason is not None for sample in samples)
            self.own[index] = replace(
                group,
                samples=tuple(samples),
                begun=group.begun or self.round_number,
                complete=self.round_number if is_complete else 0,
            )

    def _tell(self) -> None:
        """Tells all ranks of the groups of this one, in 16 bytes each; collective."""
        own = np.array([each.facts for each in self.own], np.int32).reshape(-1, 4)
        told = self._parts.context.gather_bytes(own.tobytes())
        rows = (np.frombuffer(data, np.int32).reshape(-1, 4).tolist() for data in told)
        self.facts = [GroupFacts(*row) for part in rows for row in part]


def _request(group: OpenGroup, number: int, max_tokens: int, encoder: Encoder) -> GenerationRequest:
    """Continues a response of a group."""
    request_id = group.request_id * len(group.samples) + number
    prompt, begun = group.prompt, group.samples[number].token_ids
    media = media_request(prompt, request_id, encoder).encoded
    return GenerationRequest(
        prompt_token_ids=(*prompt.token_ids, *begun),
        request_id=request_id,
        max_tokens=max_tokens,
        encoded=media and media.continued(begun),
    )

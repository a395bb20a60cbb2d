"""Partial rollouts: a step trains on the responses that are finished and carries the others over.

More prompts are in flight than a step trains on. They are continued in chunks of tokens until
enough groups are finished; the rest goes on in the next step under its new weights. Each token
keeps the logprob and the version of the weights that sampled it.

Source: Kimi Team 2025 (k1.5), arXiv:2501.12599, sec. 2.6.2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.records.media import require_text
from lightrft.records.rollout import Rollout
from lightrft.rollout.scoring import finished_samples, open_scorer
from lightrft.rollout.single_turn import RolloutGroups, generate
from lightrft.rollout.source import (
    InFlightGroup,
    OpenSample,
    PartialReport,
    PartialRolloutState,
    SampleRequests,
    Samples,
    SourceParts,
)
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.engine.session import EngineSession

# Every call of the engine draws under a seed of its own.
_SEED_STEP = 2_000_003


class PartialSource:
    """Source of the groups that are finished first; the others are its state.

    Args:
        parts: Of the run.
    """

    def __init__(self, parts: SourceParts) -> None:
        self._parts = parts

    def sample(self, requests: SampleRequests) -> Samples:
        """See `RolloutSource`."""
        parts, carry = self._parts, requests.carry
        groups, num_prompts = self._opened(requests)
        with requests.timer.stage("rollout"), requests.recording(parts):
            chosen, report = finish_groups(
                replace(carry, groups=(*carry.groups, *groups)),
                requests.num_prompts,
                config=parts.config,
                sampling_params=requests.params,
                session=parts.session,
            )
            asked = [chosen[i].prompt for i in requests.positions]
            requests.ledger.ask(asked, requests.positions, requests.params.n)
            rollouts = [
                item for i in requests.positions for item in self._rollouts(chosen[i], i, requests)
            ]
        samples = finished_samples(
            parts,
            requests,
            rollouts,
            scorer=open_scorer(parts, replace(requests, prompts=asked)),
            carried=carry.entries,
        )
        evidence = samples.evidence
        if evidence is not None:
            report = replace(report, carry=report.carry.with_entries(evidence.entries.values()))
        return replace(samples, num_prompts=num_prompts, partial=report)

    def _opened(self, requests: SampleRequests) -> tuple[list[InFlightGroup], int]:
        """Groups of as many prompts as may be in flight, and their number; collective."""
        prompts, draw = requests.prompts, requests.next_prompts
        groups: list[InFlightGroup] = []
        while True:
            require_text(prompts, "partial_rollout")
            groups += open_groups(
                prompts,
                first_request_id=requests.first_request_id + len(groups),
                group_size=requests.params.n,
                context=self._parts.context,
            )
            num_in_flight = len(requests.carry.groups) + len(groups)
            if draw is None or num_in_flight >= self._parts.config.num_prompts_in_flight:
                return groups, len(groups)
            prompts = draw()

    def _rollouts(
        self, group: InFlightGroup, group_id: int, requests: SampleRequests
    ) -> list[Rollout]:
        rollouts = RolloutGroups(
            [group.prompt],
            [group.request_id],
            group_ids=[group_id],
            group_size=len(group.samples),
            decoder=self._parts.decoder,
        ).in_order(group.completions(requests.params.logprobs_mode))
        return [
            replace(item, token_versions=sample.versions, segments=sample.segments)
            for item, sample in zip(rollouts, group.samples, strict=True)
        ]


def open_groups(
    prompts: Sequence[Prompt],
    *,
    first_request_id: int,
    group_size: int,
    context: DistributedContext,
) -> list[InFlightGroup]:
    """The prompts of all ranks as groups without tokens, in global order; collective.

    Args:
        prompts: This rank's; every rank has equally many.
        first_request_id: Of the first prompt over all ranks.
        group_size: Responses of each.
        context: Gathers the prompts.
    """
    by_rank: list[list[Prompt]] = context.gather_objects(list(prompts))
    distributed = [own[i] for i in range(len(prompts)) for own in by_rank]
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
    session: EngineSession,
) -> tuple[list[InFlightGroup], PartialReport]:
    """Continues what is in flight until enough groups are finished; collective.

    Groups whose oldest token is `max_staleness` updates old are trained on in this step, so they
    are waited for. Of the others, those with the oldest tokens come first.

    Args:
        carry: All groups, those of this step's prompts included; the same on every rank.
        num_wanted: Groups that a step trains on.
        config: How many prompts are in flight, and how old their tokens may become.
        sampling_params: Of whole responses; `max_tokens` is the longest.
        session: Generates.

    Returns:
        The groups to train on, the same on every rank, and a report of the others.

    Raises:
        ValueError: There are fewer groups than wanted, or no engine.
    """
    engine = session.engine
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
    while sum(group.is_finished for group in flight.values()) < num_wanted or not all(
        flight[key].is_finished for key in due
    ):
        num_calls += 1
        seed = sampling_params.seed + _SEED_STEP * num_calls
        params = replace(sampling_params, n=1, max_tokens=chunk, seed=seed)
        flight = _continue(flight, params, sampling_params.max_tokens, session)
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


def _num_tokens(groups: Iterable[InFlightGroup]) -> int:
    return sum(len(sample.token_ids) for group in groups for sample in group.samples)


def _continue(
    flight: dict[int, InFlightGroup],
    params: SamplingParams,
    max_tokens: int,
    session: EngineSession,
) -> dict[int, InFlightGroup]:
    """Every unfinished response with one more chunk; distributed over ranks evenly."""
    places = [
        (key, index)
        for key, group in flight.items()
        for index, sample in enumerate(group.samples)
        if sample.finish_reason is None
    ]
    own = places[session.context.rank :: session.context.world_size]
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
    parts = generate(session, params, requests)
    # Every rank knows the contexts.
    found = {
        place: replace(part, prompt_token_ids=()) for place, part in zip(own, parts, strict=True)
    }
    everything: dict[tuple[int, int], Completion] = {}
    for theirs in session.context.gather_objects(found):
        everything |= theirs
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

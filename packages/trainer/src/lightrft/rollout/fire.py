"""FIRE sampling: the first token of a response is drawn at a high temperature, the rest as usual.

Two calls of the engine: one for the first token, one that continues each response from it. The
logprob of every token is that under the distribution it was drawn from, so importance weights
stay exact.

Source: Chen et al. 2024, "Flaming-hot Initiation with Regular Execution", arXiv:2410.21236.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightrft.config.parts.rollout import SamplingOptions
from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.records.columns import join_facts
from lightrft.records.media import require_text
from lightrft.records.rollout import Rollout, TurnSegment
from lightrft.rollout.single_turn import Openings, RolloutGroups, SingleTurnSource, generate
from lightrft.rollout.source import SampleRequests, Samples
from lightrft.strategy.engine.session import EngineSession

# Continuations are requests of their own; another seed keeps their random numbers apart from
# those of first tokens under the same request id.
_SEED_OFFSET = 1_000_003


class FireSource(SingleTurnSource):
    """Single turns whose first token is drawn at a temperature of its own; greedy ones as usual."""

    @classmethod
    def openings(
        cls, config: SamplingOptions, params: SamplingParams, prompts: Sequence[Prompt] = ()
    ) -> Openings:
        """Return the first token and its temperature; prompts are texts."""
        require_text(prompts, "use_fire")
        return ((1, replace(params, temperature=config.first_token_temperature)),)

    def sample(self, requests: SampleRequests) -> Samples:
        """See `RolloutSource`."""
        if not requests.params.is_greedy:
            require_text(requests.prompts, "use_fire")
        return super().sample(requests)

    def _generate(
        self, groups: RolloutGroups, asked: Sequence[GenerationRequest], params: SamplingParams
    ) -> list[Rollout]:
        if params.is_greedy:
            return super()._generate(groups, asked, params)
        first = self._parts.config.first_token_temperature
        completions = generate_fire(
            self._parts.session, params, asked, first_token_temperature=first
        )
        return [
            replace(item, segments=fire_segments(item.completion, group_size=params.n))
            for item in groups.in_order(completions)
        ]


def generate_fire(
    session: EngineSession,
    sampling_params: SamplingParams,
    requests: Sequence[GenerationRequest],
    *,
    first_token_temperature: float,
) -> list[Completion]:
    """Completions of this rank's requests, prompt-major; collective. The engine stays awake.

    A response whose first token ends it is complete after the first call.

    Args:
        session: Generates.
        sampling_params: Of all tokens but the first; n completions per request.
        requests: This rank's requests.
        first_token_temperature: Of the first token.

    Raises:
        ValueError: There are stop strings, which could begin in the first token.
        RuntimeError: The weights changed between the two calls.
    """
    if sampling_params.stop:
        raise ValueError("FIRE sampling knows no stop strings: use stop_token_ids")
    opening = replace(
        sampling_params,
        temperature=first_token_temperature,
        max_tokens=1,
        min_tokens=min(1, sampling_params.min_tokens),
    )
    firsts = generate(session, opening, requests)
    if sampling_params.max_tokens == 1:
        return firsts
    open_positions = [i for i, first in enumerate(firsts) if first.finish_reason == "length"]
    rest = replace(
        sampling_params,
        n=1,
        max_tokens=sampling_params.max_tokens - 1,
        min_tokens=max(0, sampling_params.min_tokens - 1),
        seed=sampling_params.seed + _SEED_OFFSET,
    )
    # Every rank makes the second call, with whatever is unfinished there.
    unfinished = [
        GenerationRequest(
            prompt_token_ids=(*first.prompt_token_ids, *first.output_token_ids),
            request_id=_request_of_rest(first.request_id, first.sample_index, sampling_params.n),
        )
        for first in (firsts[i] for i in open_positions)
    ]
    continuations = generate(session, rest, unfinished)
    completions = list(firsts)
    for position, continuation in zip(open_positions, continuations, strict=True):
        completions[position] = _join(firsts[position], continuation)
    return completions


def fire_segments(response: Completion, *, group_size: int) -> tuple[TurnSegment, ...]:
    """The calls of the engine that sampled a response of `generate_fire`."""
    request_id, index = response.request_id, response.sample_index
    first = TurnSegment(request_id, index)
    if len(response.output_token_ids) < 2:
        return (first,)
    return first, TurnSegment(_request_of_rest(request_id, index, group_size))


def _request_of_rest(request_id: int, sample_index: int, group_size: int) -> int:
    return request_id * group_size + sample_index


def _join(first: Completion, rest: Completion) -> Completion:
    if rest.weights_version != first.weights_version:
        raise RuntimeError(
            "the weights changed between the first token and the rest: versions "
            f"{first.weights_version} and {rest.weights_version} for request {first.request_id}"
        )
    return replace(
        first,
        output_token_ids=(*first.output_token_ids, *rest.output_token_ids),
        output_logprobs=(*first.output_logprobs, *rest.output_logprobs),
        facts=join_facts(
            (len(first.output_token_ids), first.facts), (len(rest.output_token_ids), rest.facts)
        ),
        finish_reason=rest.finish_reason,
    )

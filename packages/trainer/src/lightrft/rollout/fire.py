"""FIRE sampling: the first token of a response is drawn at a high temperature, the rest as usual.

There are two engine calls: one samples the first token, the other continues each response. The
logprob of every token is taken under the distribution that sampled it, so importance weights stay
exact.

Source: Chen et al. 2024, "Flaming-hot Initiation with Regular Execution", arXiv:2410.21236.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightrft.config import SamplingOptions
from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.records.media import require_text
from lightrft.records.rollout import Rollout, TurnSegment
from lightrft.rollout.single_turn import RolloutGroups, SingleTurnSource, generate
from lightrft.rollout.transcript import join_completions
from lightrft.strategy.engine.session import EngineSession

# Continuations are separate requests. Another seed separates their random numbers from those of
# first tokens with the same request id.
_SEED_OFFSET = 1_000_003


class FireSource(SingleTurnSource):
    """Source of single turns with a separate first-token temperature, except greedy ones."""

    @staticmethod
    def first_temperature(config: SamplingOptions, prompts: Sequence[Prompt] = ()) -> float:
        """Return the temperature of the first token of a response to a text."""
        require_text(prompts, "use_fire")
        return config.first_token_temperature

    def _generate(
        self, groups: RolloutGroups, asked: Sequence[GenerationRequest], params: SamplingParams
    ) -> list[Rollout]:
        if params.is_greedy:
            return super()._generate(groups, asked, params)
        first = self.first_temperature(self._parts.config, groups.prompts)
        completions = generate_fire(
            self._parts.session, params, asked, first_token_temperature=first
        )
        return [_with_segment_of_rest(item, params.n) for item in groups.in_order(completions)]


def generate_fire(
    session: EngineSession,
    sampling_params: SamplingParams,
    requests: Sequence[GenerationRequest],
    *,
    first_token_temperature: float,
) -> list[Completion]:
    """Return completions of this rank's requests, prompt-major; collective.

    The engine stays awake. A response that ends with its first token needs no second call.

    Args:
        session: Session of the engine.
        sampling_params: Parameters of all tokens but the first; n completions per request.
        requests: Requests of this rank.
        first_token_temperature: Temperature of the first token.

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
    rest = replace(
        sampling_params,
        n=1,
        max_tokens=sampling_params.max_tokens - 1,
        min_tokens=max(0, sampling_params.min_tokens - 1),
        seed=sampling_params.seed + _SEED_OFFSET,
    )
    # Every rank must make the second call, even without unfinished responses.
    unfinished = [
        GenerationRequest(
            (*first.prompt_token_ids, *first.output_token_ids),
            _request_of_rest(first, sampling_params.n),
        )
        for first in firsts
        if first.finish_reason == "length"
    ]
    continuations = iter(generate(session, rest, unfinished))
    return [
        _join(first, next(continuations)) if first.finish_reason == "length" else first
        for first in firsts
    ]


def _with_segment_of_rest(rollout: Rollout, group_size: int) -> Rollout:
    if len(rollout.completion.output_token_ids) < 2:
        return rollout
    rest = TurnSegment(_request_of_rest(rollout.completion, group_size))
    return replace(rollout, segments=(*rollout.segments, rest))


def _request_of_rest(response: Completion, group_size: int) -> int:
    return response.request_id * group_size + response.sample_index


def _join(first: Completion, rest: Completion) -> Completion:
    if rest.weights_version != first.weights_version:
        raise RuntimeError(
            "the weights changed between the first token and the rest: versions "
            f"{first.weights_version} and {rest.weights_version} for request {first.request_id}"
        )
    joined = join_completions(first, rest)
    return replace(joined, request_id=first.request_id, sample_index=first.sample_index)

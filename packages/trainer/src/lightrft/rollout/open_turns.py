"""Open single-turn responses: how they begin, are extended and finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightrft.datasets.types import Prompt
from lightrft.engines.media.text_encoder import Encoder
from lightrft.engines.types import GenerationRequest, SamplingParams
from lightrft.records.media import media_request
from lightrft.records.rollout import Rollout
from lightrft.rollout.open_groups import OpenGroup, OpenSample
from lightrft.rollout.scoring import finished_samples, open_scorer
from lightrft.rollout.single_turn import RolloutGroups, generate
from lightrft.rollout.source import SampleRequests, Samples, SourceParts

# Every engine call uses a different seed.
_SEED_STEP = 2_000_003


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


class OpenTurns:
    """Operations on open single-turn responses.

    Args:
        parts: Parts of the run.
    """

    def __init__(self, parts: SourceParts) -> None:
        self._parts = parts

    def begin(self, request_id: int, prompt: Prompt, params: SamplingParams) -> OpenGroup:
        """Return a group without tokens."""
        return OpenGroup(request_id, prompt, (OpenSample(),) * params.n, params.logprobs_mode)

    def extended(self, groups: Sequence[OpenGroup], part: ResponsePart) -> list[OpenGroup]:
        """Sample a part with one engine call and return the groups with it.

        Raises:
            ValueError: The groups belong to episodes.
        """
        params, extended_groups = part.params, list(groups)
        if any(sample.episode is not None for group in groups for sample in group.samples):
            raise ValueError(
                "this checkpoint has unfinished episodes: start with their --environment"
            )
        places, asked = [], []
        for index, group in enumerate(groups):
            for number, sample in enumerate(group.samples):
                if part.takes(group, sample):
                    most = min(
                        part.lengths[group.request_id] or params.max_tokens, params.max_tokens
                    )
                    places.append((index, number))
                    left = most - len(sample.token_ids)
                    asked.append(_request(group, number, left, self._parts.encoder))
        call = replace(params, n=1, seed=params.seed + _SEED_STEP * part.number)
        sampled = generate(self._parts.session, call, asked)
        for (index, number), more in zip(places, sampled, strict=True):
            samples = list(extended_groups[index].samples)
            samples[number] = samples[number].extended(more, max_tokens=params.max_tokens)
            extended_groups[index] = extended_groups[index].extended(samples, part.round_number)
        return extended_groups

    def finished(
        self, groups: Sequence[OpenGroup], group_ids: Sequence[int], requests: SampleRequests
    ) -> Samples:
        """Return complete groups as scored samples; collective."""
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


def _request(group: OpenGroup, number: int, max_tokens: int, encoder: Encoder) -> GenerationRequest:
    """Return the request that continues a response of a group."""
    request_id = group.request_id * len(group.samples) + number
    prompt, begun = group.prompt, group.samples[number].token_ids
    media = media_request(prompt, request_id, encoder).encoded
    return GenerationRequest(
        prompt_token_ids=(*prompt.token_ids, *begun),
        request_id=request_id,
        max_tokens=max_tokens,
        encoded=media and media.continued(begun),
    )

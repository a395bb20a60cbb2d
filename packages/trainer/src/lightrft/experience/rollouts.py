"""Prompts to requests, and completions back to rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion, GenerationRequest, MultiModalInputs
from lightrft.experience.types import Rollout


class Decoder(Protocol):
    """The part of a tokenizer that turns sampled ids into text."""

    pad_token_id: int | None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of the ids."""
        ...


def global_positions(num_local: int, *, rank: int, world_size: int) -> tuple[int, ...]:
    """Positions of this rank's prompts among those of all ranks.

    A distributed sampler gives consecutive prompts to consecutive ranks, so the positions (and
    with them the random numbers of a prompt) do not depend on the number of ranks.
    """
    return tuple(position * world_size + rank for position in range(num_local))


def build_requests(
    prompts: Sequence[Prompt], request_ids: Sequence[int]
) -> list[GenerationRequest]:
    """One request a prompt; the request id fixes its random numbers."""
    return [
        GenerationRequest(
            prompt_token_ids=prompt.token_ids,
            request_id=request_id,
            prompt_text=prompt.text,
            multi_modal=MultiModalInputs(images=prompt.images, videos=prompt.videos),
        )
        for prompt, request_id in zip(prompts, request_ids, strict=True)
    ]


def pair_completions(
    prompts: Sequence[Prompt],
    request_ids: Sequence[int],
    completions: Sequence[Completion],
    *,
    group_ids: Sequence[int],
    group_size: int,
    decoder: Decoder,
) -> list[Rollout]:
    """Completions with the prompts they answer, prompt-major.

    Raises:
        RuntimeError: The engine returned another number or order of completions than asked for,
            or gave a completion up.
    """
    expected = [(request_id, index) for request_id in request_ids for index in range(group_size)]
    received = [(item.request_id, item.sample_index) for item in completions]
    if received != expected:
        raise RuntimeError(
            f"the engine must return {group_size} completions for each of {len(prompts)} prompts, "
            f"prompt after prompt: got {len(received)} completions, first difference at "
            f"{_first_difference(received, expected)}"
        )
    aborted = [item.request_id for item in completions if item.finish_reason == "abort"]
    if aborted:
        raise RuntimeError(
            f"the engine aborted {len(aborted)} completions (requests {aborted[:10]}); an aborted "
            "completion is not a sample of the policy. Look for the cause in the engine's output"
        )
    return [
        Rollout(
            prompt=prompts[position // group_size],
            completion=completion,
            group_id=group_ids[position // group_size],
            sample_id=group_ids[position // group_size] * group_size + completion.sample_index,
            response_text=decoder.decode(completion.output_token_ids, skip_special_tokens=True),
        )
        for position, completion in enumerate(completions)
    ]


def _first_difference(
    received: Sequence[tuple[int, int]], expected: Sequence[tuple[int, int]]
) -> str:
    for position, (got, wanted) in enumerate(zip(received, expected, strict=False)):
        if got != wanted:
            return f"position {position}: got (request, sample) {got}, expected {wanted}"
    return f"position {min(len(received), len(expected))}: one of the lists ends"

"""Completions under construction: what backends sampled, joined and cut where they must end."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from lightrft.engines.hf.random import row_keys
from lightrft.engines.hf.stopping import StopStringMatcher, TextDecoder
from lightrft.engines.requests import Row
from lightrft.engines.types import Completion, FinishReason, SamplingParams

_CPU = torch.device("cpu")
# vLLM adds the sample index to a seed, which must stay within 64 bits.
_SEED_MASK = 2**62 - 1


@dataclass(frozen=True, slots=True)
class RawCompletion:
    """Tokens of one completion so far.

    Args:
        token_ids, logprobs: What was sampled.
        finish_reason: Why it ended.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def request_seed(seed: int, request_id: int, part: int) -> int:
    """A seed that depends on nothing but its arguments; nearby ids give unrelated seeds."""
    return int(row_keys(seed, [request_id], [part], device=_CPU)[0]) & _SEED_MASK


def joined(
    first: RawCompletion, second: RawCompletion, params: SamplingParams, decoder: TextDecoder | None
) -> RawCompletion:
    """A completion from its two parts, ended at the first stop string after its minimum.

    The backend saw the second part alone, and a string may begin in the first.
    """
    whole = RawCompletion(
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        second.finish_reason,
    )
    if decoder is None:
        return whole
    return cut_at_string(whole, params, decoder)


def cut_at_string(
    raw: RawCompletion, params: SamplingParams, decoder: TextDecoder
) -> RawCompletion:
    """The completion up to the first stop string that ends at or after `min_tokens`."""
    matcher = StopStringMatcher(params.stop, decoder, 1)
    for index, token in enumerate(raw.token_ids):
        is_match = matcher.push(0, token)
        if is_match and index + 1 >= params.min_tokens:
            return RawCompletion(raw.token_ids[: index + 1], raw.logprobs[: index + 1], "stop")
    return raw


def cut_at_token(
    raw: RawCompletion, stop_ids: Collection[int], *, min_tokens: int
) -> RawCompletion:
    """The completion up to the first stop token that is number `min_tokens` or later."""
    for index, token in enumerate(raw.token_ids):
        if token in stop_ids and index + 1 >= min_tokens:
            return RawCompletion(raw.token_ids[: index + 1], raw.logprobs[: index + 1], "stop")
    return raw


def completion_of(row: Row, raw: RawCompletion, params: SamplingParams, version: int) -> Completion:
    """The record for one row.

    Raises:
        FloatingPointError: A logprob is not a finite number.
    """
    if not math.isfinite(math.fsum(raw.logprobs)):
        raise FloatingPointError(
            f"request {row.request_id}: the model's logits are not finite "
            f"(weights_version {version})"
        )
    return Completion(
        request_id=row.request_id,
        sample_index=row.sample_index,
        prompt_token_ids=row.prompt,
        output_token_ids=raw.token_ids,
        output_logprobs=raw.logprobs,
        logprobs_mode=params.logprobs_mode,
        finish_reason=raw.finish_reason,
        weights_version=version,
    )

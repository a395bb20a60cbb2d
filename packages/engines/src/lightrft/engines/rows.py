"""Conversion of requests to rows to sample, and of samples to completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch

from lightrft.engines.media.media import EncodedPrompt
from lightrft.engines.sampling import row_keys
from lightrft.engines.text import StopStringMatcher, TextDecoder
from lightrft.engines.types import (
    Completion,
    Facts,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)

_CPU = torch.device("cpu")
# vLLM adds the sample index to a seed, which must stay within 64 bits.
_SEED_MASK = 2**62 - 1


@dataclass(frozen=True, slots=True)
class RequestedSample:
    """Completion to sample.

    Args:
        index: Place in the prompt-major result.
        request_id: Id of the request that it answers.
        sample_index: Index among the request's samples, 0 .. n-1.
        prompt: Prompt token ids, not empty.
        max_tokens: Most tokens to sample.
        media: Encoded prompt, if it has images or videos.
    """

    index: int
    request_id: int
    sample_index: int
    prompt: tuple[int, ...]
    max_tokens: int
    media: EncodedPrompt | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a model.

    Args:
        vocab_size: Bound of token ids, exclusive.
        num_rows: Number of logits; those from `vocab_size` on are never sampled.
        max_model_len: Longest prompt plus completion, in tokens; None is unlimited.
        engine_name: Name of the engine in errors.
        reads_media: Whether prompts may have images and videos.
    """

    vocab_size: int
    max_model_len: int | None
    engine_name: str
    reads_media: bool = False
    num_rows: int = 0

    @property
    def is_padded(self) -> bool:
        """Return whether the output projection has rows that are no tokens."""
        return self.num_rows > self.vocab_size


def rows_of_requests(
    requests: Sequence[GenerationRequest],
    params: SamplingParams,
    limits: Limits,
    *,
    encode: Callable[[str], tuple[int, ...]],
    encode_media: Callable[[GenerationRequest], EncodedPrompt | None],
) -> list[RequestedSample]:
    """Check requests and list their completions, prompt-major.

    Args:
        requests: Requests to check.
        params: Number of completions per request, and the default bound of their tokens.
        limits: Limits of the model.
        encode: Function from a prompt text to token ids, for requests without ids.
        encode_media: Function that encodes a prompt with images or videos, or returns None to
            leave its ids unchanged.

    Raises:
        ValueError: A request is malformed; the message names its id.
    """
    rows: list[RequestedSample] = []
    seen: set[int] = set()
    for request in requests:
        if request.request_id in seen:
            raise ValueError(
                f"request ids must be unique within one generate() call: got "
                f"{request.request_id} twice"
            )
        seen.add(request.request_id)
        bound = params.max_tokens if request.max_tokens is None else request.max_tokens
        media = _media(request, limits, encode_media)
        prompt = _checked_prompt(request, bound, limits, media.token_ids if media else None, encode)
        start = len(rows)
        rows += [
            RequestedSample(start + i, request.request_id, i, prompt, bound, media)
            for i in range(params.n)
        ]
    return rows


def _media(
    request: GenerationRequest,
    limits: Limits,
    encode: Callable[[GenerationRequest], EncodedPrompt | None],
) -> EncodedPrompt | None:
    if request.encoded is None and request.multi_modal.is_empty:
        return None
    if not limits.reads_media:
        raise ValueError(
            f"request {request.request_id} has images or videos, but the {limits.engine_name} "
            "engine reads text only; "
            "use a vision-language model with an engine that supports it"
        )
    return request.encoded or encode(request)


def _checked_prompt(
    request: GenerationRequest,
    bound: int,
    limits: Limits,
    encoded: tuple[int, ...] | None,
    encode: Callable[[str], tuple[int, ...]],
) -> tuple[int, ...]:
    name = f"request {request.request_id}"
    prompt = encoded or tuple(request.prompt_token_ids)
    if not prompt and request.prompt_text:
        prompt = encode(request.prompt_text)
    if not prompt:
        raise ValueError(f"{name} has an empty prompt; give prompt_token_ids or prompt_text")
    # Placeholders of media may lie beyond the vocabulary.
    if encoded is None and (min(prompt) < 0 or max(prompt) >= limits.vocab_size):
        raise ValueError(
            f"{name} has token ids outside the vocabulary: got {min(prompt)} .. {max(prompt)}, "
            f"expected 0 .. {limits.vocab_size - 1}"
        )
    if bound < 1:
        raise ValueError(f"{name}: max_tokens must be at least 1: got {bound}")
    if limits.max_model_len is not None and len(prompt) + bound > limits.max_model_len:
        raise ValueError(
            f"{name} needs {len(prompt)} prompt tokens + {bound} new tokens, more than "
            f"max_model_len {limits.max_model_len}; shorten the prompt or lower max_tokens"
        )
    return prompt


@dataclass(frozen=True, slots=True)
class RawCompletion:
    """Tokens of one completion so far.

    Args:
        token_ids, logprobs: Sampled tokens and their logprobs.
        finish_reason: Reason why it ended.
        facts: Further facts, as in `Completion`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    facts: Facts = field(default_factory=dict)

    def cut(self, num_tokens: int) -> RawCompletion:
        """Return the first tokens, as if it had stopped there."""
        facts = {name: values[:num_tokens] for name, values in self.facts.items()}
        return RawCompletion(self.token_ids[:num_tokens], self.logprobs[:num_tokens], "stop", facts)


def request_seed(seed: int, request_id: int, part: int) -> int:
    """Return a seed that depends only on the arguments; nearby ids give unrelated seeds."""
    return int(row_keys(seed, [request_id], [part], device=_CPU)[0]) & _SEED_MASK


@dataclass(frozen=True, slots=True)
class Job:
    """Request to a backend.

    Args:
        prompt: Token ids of the prompt.
        max_tokens: Most tokens of each sample.
        seed: Seed that fixes its random numbers, together with their positions.
        num_samples: Number of samples of this prompt.
        media: Encoded prompt, whose token ids begin `prompt`; None for text.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    num_samples: int = 1
    media: EncodedPrompt | None = None


def first_job(row: RequestedSample, params: SamplingParams, *, num_samples: int = 1) -> Job:
    """Return the first job of a row: up to `min_tokens` - 1 tokens, or all without a minimum."""
    bound = row.max_tokens
    if params.min_tokens > 1:
        bound = min(bound, params.min_tokens - 1)
    seed = request_seed(params.seed, row.request_id, row.sample_index)
    return Job(row.prompt, bound, seed, num_samples, row.media)


def next_job(
    row: RequestedSample, raw: RawCompletion, params: SamplingParams, *, part: int
) -> Job | None:
    """Return the job that continues a completion after its minimum, or None if it is full."""
    left = row.max_tokens - len(raw.token_ids)
    if left <= 0:
        return None
    seed = request_seed(params.seed, row.request_id, part)
    return Job((*row.prompt, *raw.token_ids), left, seed, media=row.media)


# Index of a job, and its samples in order.
FinishedJob = tuple[int, list[RawCompletion]]
FinishedRow = tuple[RequestedSample, RawCompletion]


class RunJobs(Protocol):
    """Function that runs jobs on a backend."""

    def __call__(self, jobs: Sequence[Job], *, with_stops: bool) -> Iterable[list[FinishedJob]]:
        """Yield jobs as they end, in batches of at least one."""


def stream_in_parts(
    run: RunJobs,
    first_jobs: Sequence[Job],
    rows: Sequence[RequestedSample],
    params: SamplingParams,
    decoder: TextDecoder | None,
    *,
    next_part: int,
) -> Iterator[list[FinishedRow]]:
    """Yield rows as they end, sampling the tokens before `min_tokens` as a first part.

    Nothing stops in the first part.

    Args:
        run: Function that runs jobs on the backend.
        first_jobs: First jobs, with one sample for each row.
        rows, params: Rows to sample and their parameters.
        decoder: Decoder for stop strings that begin in the first part; None if they are matched
            later, or there are none.
        next_part: Offset of the sample index for the seed of the second part.
    """
    has_minimum = params.min_tokens > 1
    parts = _of_rows(run(first_jobs, with_stops=not has_minimum), first_jobs, rows)
    if not has_minimum:
        yield from parts
        return
    firsts = {row.index: raw for part in parts for row, raw in part}
    full: list[FinishedRow] = []
    jobs: list[Job] = []
    unfinished: list[RequestedSample] = []
    for row in rows:
        raw = firsts[row.index]
        job = next_job(row, raw, params, part=row.sample_index + next_part)
        if job is None:
            full.append((row, raw))
        else:
            jobs.append(job)
            unfinished.append(row)
    if full:
        yield full
    if jobs:
        for part in _of_rows(run(jobs, with_stops=True), jobs, unfinished):
            yield [(row, joined(firsts[row.index], raw, params, decoder)) for row, raw in part]


def _of_rows(
    parts: Iterable[list[FinishedJob]], jobs: Sequence[Job], rows: Sequence[RequestedSample]
) -> Iterator[list[FinishedRow]]:
    """Yield the samples of jobs with their rows, which are in the order of the jobs."""
    ends = list(accumulate(job.num_samples for job in jobs))
    for part in parts:
        yield [
            answered
            for index, raws in part
            for answered in zip(rows[ends[index] - len(raws) : ends[index]], raws, strict=True)
        ]


def joined(
    first: RawCompletion, second: RawCompletion, params: SamplingParams, decoder: TextDecoder | None
) -> RawCompletion:
    """Join the two parts of a completion, and end it at the first stop string after its minimum.

    The backend matched strings in the second part only, and one may begin in the first.
    """
    whole = RawCompletion(
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        second.finish_reason,
        {name: values + second.facts[name] for name, values in first.facts.items()},
    )
    if decoder is None:
        return whole
    return cut_at_string(whole, params, decoder)


def cut_at_string(
    raw: RawCompletion, params: SamplingParams, decoder: TextDecoder
) -> RawCompletion:
    """Return the completion up to the first stop string that ends at or after `min_tokens`."""
    return _cut(raw, StopStringMatcher(params.stop, decoder).push, params.min_tokens)


def cut_at_token(
    raw: RawCompletion, stop_ids: Collection[int], *, min_tokens: int
) -> RawCompletion:
    """Return the completion up to the first stop token at number `min_tokens` or later."""
    return _cut(raw, lambda token: token in stop_ids, min_tokens)


def _cut(raw: RawCompletion, ends: Callable[[int], bool], min_tokens: int) -> RawCompletion:
    for count, token in enumerate(raw.token_ids, start=1):
        # The matcher must see every token, also before the minimum.
        if ends(token) and count >= min_tokens:
            return raw.cut(count)
    return raw


def completion_of(
    row: RequestedSample, raw: RawCompletion, params: SamplingParams, version: int
) -> Completion:
    """Return the completion of one row.

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
        facts=raw.facts,
    )

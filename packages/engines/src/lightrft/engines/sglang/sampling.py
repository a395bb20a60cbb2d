"""Requests in SGLang's form, and raw completions from its answers."""

from collections.abc import Mapping, Sequence
from typing import cast

from lightrft.engines.raw_completions import Job, RawCompletion
from lightrft.engines.types import FinishReason, SamplingParams


def native_params(
    job: Job, params: SamplingParams, stop_ids: Sequence[int], *, with_stops: bool, vocab_size: int
) -> dict[str, object]:
    """Sampling parameters under SGLang's names.

    Args:
        job: What to sample.
        params: Ours.
        stop_ids: Every id that ends a completion.
        with_stops: Whether they count. SGLang ignores them together with end-of-sequence ids.
        vocab_size: Of the model.
    """
    top_k = -1
    if params.truncates:
        # SGLang tells the distribution over the kept tokens only where their number has a bound.
        top_k = vocab_size if params.top_k == -1 else min(params.top_k, vocab_size)
    return {
        "max_new_tokens": job.max_tokens,
        "temperature": params.temperature,
        "top_p": 1.0 if params.is_greedy else params.top_p,
        "top_k": top_k,
        "min_p": 0.0 if params.is_greedy else params.min_p,
        "sampling_seed": job.seed,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": params.ignore_eos or not with_stops,
        "no_stop_trim": True,
    }


def raw_of(answer: Mapping[str, object], params: SamplingParams) -> RawCompletion:
    """Tokens and logprobs of one answer.

    Raises:
        RuntimeError: SGLang gave the request up; the message is its own.
    """
    about = cast("Mapping[str, object]", answer["meta_info"])
    reason = cast("Mapping[str, object]", about["finish_reason"])
    if reason["type"] == "abort":
        raise RuntimeError(f"sglang gave a request up: {reason.get('message', 'no reason given')}")
    tokens = tuple(cast("Sequence[int]", answer["output_ids"]))
    if params.truncates:
        logprobs = tuple(cast("Sequence[float]", about["output_token_sampling_logprobs"]))
    else:
        entries = cast("Sequence[tuple[float, int, None]]", about["output_token_logprobs"])
        logprobs = tuple(entry[0] for entry in entries)
    finish: FinishReason = "stop" if reason["type"] == "stop" else "length"
    return RawCompletion(tokens, logprobs[: len(tokens)], finish)

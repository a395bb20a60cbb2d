"""Requests in vLLM's form, and completions from its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from lightrft.engines.rows import Job, RawCompletion
from lightrft.engines.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from vllm import CompletionOutput
    from vllm.logprobs import FlatLogprobs


def native_params(
    job: Job, params: SamplingParams, stop_ids: Sequence[int], *, with_stops: bool
) -> object:
    """Sampling parameters of vLLM for one job.

    End-of-sequence ids come as plain stop ids, and `min_tokens` is never passed: vLLM would
    exclude the stop tokens from the distribution that tokens are drawn from.

    Args:
        job: What to sample.
        params: Ours.
        stop_ids: Every id that ends a completion.
        with_stops: Whether stop ids and strings count.
    """
    from vllm import SamplingParams as NativeParams

    # Numbers in a few lists, in place of a dictionary and an object for each token.
    flat = {"flat_logprobs": True} if "flat_logprobs" in NativeParams.__struct_fields__ else {}
    stops = list(params.stop) if with_stops else []
    return NativeParams(
        n=1 if params.is_greedy else job.num_samples,
        temperature=params.temperature,
        top_p=1.0 if params.is_greedy else params.top_p,
        top_k=-1 if params.is_greedy else params.top_k,
        min_p=0.0 if params.is_greedy else params.min_p,
        seed=job.seed,
        max_tokens=job.max_tokens,
        stop=stops,
        stop_token_ids=list(stop_ids) if with_stops else [],
        ignore_eos=True,
        logprobs=0,
        detokenize=bool(stops),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        **flat,
    )


def raw_completions_of(job: Job, outputs: Sequence[CompletionOutput]) -> list[RawCompletion]:
    """The samples of one job, in order; greedy ones are the same sample `num_samples` times."""
    raws = []
    for output in sorted(outputs, key=lambda o: o.index):
        tokens = tuple(int(t) for t in output.token_ids)
        logprobs = _sampled_logprobs(tokens, output.logprobs)
        raws.append(RawCompletion(tokens, logprobs, _reason(output.finish_reason)))
    return raws * job.num_samples if len(raws) == 1 else raws


def _sampled_logprobs(tokens: tuple[int, ...], logprobs: object) -> tuple[float, ...]:
    """The logprob of each sampled token, from either of vLLM's forms."""
    if isinstance(logprobs, list):
        return tuple(
            float(entry[token].logprob) for token, entry in zip(tokens, logprobs, strict=True)
        )
    flat = cast("FlatLogprobs", logprobs)
    if tuple(flat.token_ids) != tokens:
        raise RuntimeError(
            f"vLLM gave logprobs of {len(flat.token_ids)} tokens that are not the {len(tokens)} "
            "sampled ones: report this with vLLM's version"
        )
    return tuple(flat.logprobs)


def _reason(native: str | None) -> FinishReason:
    reasons: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}
    return reasons.get(native, "abort")


def scoring_params() -> object:
    """Parameters for scoring a prompt: logprobs of its tokens; the one sampled token is lost."""
    from vllm import SamplingParams as NativeParams

    return NativeParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)

"""Drawing of tokens: distributions, log-probabilities and random numbers.

The numbers are counter-based: each depends only on its coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lightrft.engines.types import MOST_KEPT_IDS, SamplingParams
from lightrft.kernels.weight_bucket.reference import mix64_, shift_right, to_signed


def sampling_logprobs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return log-probabilities of the distribution from which tokens are drawn.

    log_softmax(logits / T) in float32; with truncation, renormalised over the kept tokens. The
    order is top_k, then top_p over the mass that top_k left, then min_p. T = 0 is scored at T = 1.

    Args:
        logits: [rows, vocab], any float dtype.
        params: Temperature and truncation.

    Returns:
        [rows, vocab] float32; tokens that cannot be drawn have -inf.
    """
    scaled = logits.float()
    if params.temperature not in (0.0, 1.0):
        scaled = scaled / params.temperature
    if not params.truncates:
        return scaled.log_softmax(dim=-1)
    kept = keep_support(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    return kept.log_softmax(dim=-1)


def keep_support(
    logits: torch.Tensor, *, top_k: int, top_p: float, min_p: float, min_p_first: bool = False
) -> torch.Tensor:
    """Mask tokens that cannot be drawn: top_k, then top_p over the mass top_k left, then min_p.

    Args:
        logits: [rows, vocab] float32 or float64, temperature included.
        top_k, top_p, min_p: Truncations as in `SamplingParams`; -1, 1 and 0 keep all.
        min_p_first: Whether min_p acts before both others.

    Returns:
        [rows, vocab] with -inf at masked tokens.
    """
    if min_p > 0 and min_p_first:
        logits = keep_min_p(logits, min_p)
    if top_k != -1:
        logits = keep_top_k(logits, top_k)
    if top_p < 1:
        logits = keep_top_p(logits, top_p)
    if min_p > 0 and not min_p_first:
        logits = keep_min_p(logits, min_p)
    return logits


def draw_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution, or take the best one.

    Args:
        logits: [rows, vocab], any float dtype.
        uniforms: [rows] float64 in [0, 1); unused at temperature 0.
        params: Temperature and truncation.

    Returns:
        Tokens [rows] int64 and their log-probabilities [rows] float32 under `sampling_logprobs`.
    """
    return draw_from(sampling_logprobs(logits, params), logits, uniforms, params)


def draw_from(
    logprobs: torch.Tensor, logits: torch.Tensor, uniforms: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw as `draw_tokens`, from known log-probabilities [rows, vocab] of these logits."""
    if params.is_greedy:
        # Logits, not logprobs, whose rounding could make two candidates equal.
        tokens = logits.argmax(dim=-1, keepdim=True)
    else:
        tokens = invert_cumulative(logprobs, uniforms)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def kept_ids(logprobs: torch.Tensor, most: int = MOST_KEPT_IDS) -> list[str]:
    """Return the ids that can be drawn in each row, as the fact `KEPT_IDS`.

    Args:
        logprobs: [rows, vocab] of `sampling_logprobs`.
        most: Number of ids above which a row's ids are not recorded.
    """
    is_kept = logprobs > float("-inf")
    sizes = is_kept.sum(dim=-1)
    is_kept &= (sizes <= most)[:, None]
    counts = is_kept.sum(dim=-1).tolist()
    ids = is_kept.nonzero()[:, 1].cpu().numpy()
    return [pack_ids(part) for part in np.split(ids, np.cumsum(counts)[:-1])]


def pack_ids(ids: Sequence[int] | np.ndarray) -> str:
    """Return ids as int32 in hexadecimal."""
    return np.asarray(ids, dtype="<i4").tobytes().hex()


def invert_cumulative(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative probability exceeds u times the total.

    A token of probability 0 is never returned.

    Args:
        logprobs: [rows, vocab] float32.
        uniforms: [rows] float64, multiples of 2^-52 in [0, 1).

    Returns:
        [rows, 1] int64.
    """
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    thresholds = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True)
    # Only a row of NaNs reaches the clamp; its logprob is NaN, which `generate` reports.
    return tokens.clamp_(max=logprobs.shape[-1] - 1)


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Mask all but the k largest logits of a row; among equal ones keep the lowest ids.

    Args:
        logits: [rows, vocab] float32.
        k: Number of tokens to keep, >= 1.

    Returns:
        [rows, vocab] float32 with -inf at masked tokens.
    """
    if k >= logits.shape[-1]:
        return logits
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    is_above = logits > threshold
    is_tied = logits == threshold
    num_free = k - is_above.sum(dim=-1, keepdim=True)
    is_kept = is_above | (is_tied & (is_tied.cumsum(dim=-1) <= num_free))
    return logits.masked_fill(~is_kept, float("-inf"))


def keep_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask all but the smallest set of most likely tokens whose probability reaches top_p.

    Args:
        logits: [rows, vocab] float32; -inf entries have no probability.
        top_p: Bound in (0, 1).

    Returns:
        [rows, vocab] float32 with -inf at masked tokens; at least one token is kept.
    """
    # A stable sort keeps the lowest ids among equally likely tokens.
    descending, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = descending.double().softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    is_dropped_sorted = mass_before >= top_p
    is_dropped_sorted[:, 0] = False
    is_dropped = torch.zeros_like(is_dropped_sorted).scatter_(-1, order, is_dropped_sorted)
    return logits.masked_fill(is_dropped, float("-inf"))


def keep_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Mask tokens less likely than min_p times the most likely token.

    Args:
        logits: [rows, vocab] float32.
        min_p: Bound in (0, 1].

    Returns:
        [rows, vocab] float32 with -inf at masked tokens.
    """
    # p_i / p_max = exp(logit_i - logit_max): no normalisation is needed.
    ratio = (logits - logits.amax(dim=-1, keepdim=True)).double().exp()
    return logits.masked_fill(ratio < min_p, float("-inf"))


_MANTISSA_BITS = 52


def mix64(values: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's output function to each element, modulo 2^64.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", fig. 16.

    Args:
        values: int64 of any shape, read as unsigned.

    Returns:
        int64 of the same shape.
    """
    return mix64_(values.clone())


def row_keys(
    seed: int, request_ids: Sequence[int], sample_indices: Sequence[int], *, device: torch.device
) -> torch.Tensor:
    """Return one 64-bit key for each (seed, request, sample).

    Returns:
        [rows] int64.
    """
    seeds = torch.tensor([to_signed(seed)], dtype=torch.int64, device=device)
    requests = torch.tensor([to_signed(i) for i in request_ids], dtype=torch.int64, device=device)
    samples = torch.tensor(list(sample_indices), dtype=torch.int64, device=device)
    return mix64(mix64(mix64(seeds) ^ requests) ^ samples)


def uniforms(keys: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return uniform numbers in [0, 1) for output positions start .. stop-1 of each row.

    They are multiples of 2^-52, so that u * total < total holds after rounding to float64.

    Args:
        keys: [rows] int64 from `row_keys`.
        start, stop: Range of output positions.

    Returns:
        [stop - start, rows] float64.
    """
    positions = torch.arange(start, stop, dtype=torch.int64, device=keys.device)
    bits = mix64(keys[None, :] ^ mix64(positions)[:, None])
    return shift_right(bits, 64 - _MANTISSA_BITS).to(torch.float64) * 2.0**-_MANTISSA_BITS

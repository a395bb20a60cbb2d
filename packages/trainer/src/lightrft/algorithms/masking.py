"""Masks over tokens: sums within the response mask, and masks of the tokens of high entropy.

Values outside a mask may be anything, NaN and infinity included: they are replaced, never
multiplied by 0.

The masks of high entropy keep tokens of the numerator: multiply the token loss by them
(`TokenLoss.weighted`) and leave the response mask, and so Z, alone. Otherwise the step grows by
about 1 / ratio. Source: Wang et al. 2025, arXiv:2506.01939.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """`values` in float32, or unchanged if already float64."""
    return values if values.dtype == torch.float64 else values.float()


def mask_out(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 outside `mask`, whatever stood there; same shape."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def row_lengths(mask: Tensor) -> Tensor:
    """Number of tokens of every row of a [batch, seq] bool mask: [batch] int64."""
    return mask.sum(dim=-1)


def masked_row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens of every row; [batch]."""
    return mask_out(values, mask).sum(dim=-1)


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of every row; [batch], 0 for an empty row."""
    return masked_row_sum(values, mask) / row_lengths(mask).clamp(min=1)


def entropy_threshold(entropy: Tensor, response_mask: Tensor, *, ratio: float) -> Tensor:
    """Return the (1 - ratio) quantile of the entropies inside the mask, interpolated: scalar.

    Over several ranks pass the gathered entropies, so that the threshold is the whole batch's.

    Args:
        entropy: [batch, seq] or any shape.
        response_mask: bool, same shape.
        ratio: Share of tokens to keep, in (0, 1].
    """
    _check_ratio(ratio)
    inside = entropy.detach()[response_mask].double().sort().values
    if inside.numel() == 0:
        return entropy.new_zeros(())
    position = (1 - ratio) * (inside.numel() - 1)
    below = int(position)
    above = min(below + 1, inside.numel() - 1)
    return torch.lerp(inside[below], inside[above], position - below).to(entropy.dtype)


def high_entropy_mask(
    entropy: Tensor, response_mask: Tensor, *, threshold: Tensor | float
) -> Tensor:
    """Tokens with entropy >= threshold: [batch, seq] bool, within the response mask.

    Ties are kept, so constant entropy keeps everything.
    """
    return response_mask & (entropy.detach() >= threshold)


def high_entropy_mask_per_sequence(
    entropy: Tensor, response_mask: Tensor, *, ratio: float
) -> Tensor:
    """Return the max(1, floor(ratio L_i)) most uncertain tokens of every row: [batch, seq] bool.

    Ties go to the earlier token; an empty row keeps nothing.

    Args:
        entropy: [batch, seq].
        response_mask: [batch, seq] bool.
        ratio: Share of tokens to keep, in (0, 1].
    """
    _check_ratio(ratio)
    lengths = row_lengths(response_mask)
    # Through double: in float32, floor(0.3 * 10) would be 3 or 2 by the rounding of 0.3.
    num_kept = torch.floor(lengths.double() * ratio + 1e-9).long().clamp(min=1)
    inside = torch.where(response_mask, entropy.detach(), -torch.inf)
    order = inside.argsort(dim=-1, descending=True, stable=True)
    return response_mask & (order.argsort(dim=-1) < num_kept.unsqueeze(-1))


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise ValueError(f"the share of high-entropy tokens must lie in (0, 1]: got {ratio}")


MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LogRatio:
    """The log of a ratio, held within +-20.

    Args:
        values: [batch, seq], 0 outside the mask; the gradient is 0 where clamped.
        is_clamped: [batch, seq] bool, True where the clamp changed the value.
    """

    values: Tensor
    is_clamped: Tensor


def log_ratio(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> LogRatio:
    """Logprobs - other_logprobs inside the mask, clamped to +-20.

    Args:
        logprobs: [batch, seq]; the gradient flows through it only.
        other_logprobs: [batch, seq].
        mask: [batch, seq] bool. The difference is masked before anyone can exponentiate it: a
            padded logprob of -inf would turn into NaN.
    """
    return _clamped(masked_difference(logprobs, other_logprobs, mask))


def row_log_ratio(difference: Tensor, mask: Tensor, *, is_product: bool = False) -> LogRatio:
    """Return the mean of the differences of a row, repeated on its tokens.

    The mean is clamped, not its terms: a single token beyond 20 counts in full.

    Args:
        difference: [batch, seq] of `masked_difference`, or a bounded form of it.
        mask: [batch, seq] bool.
        is_product: Their sum instead: the logarithm of the product of ratios.
    """
    reduce = masked_row_sum if is_product else masked_row_mean
    rows = reduce(difference, mask).unsqueeze(-1).expand_as(difference)
    return _clamped(mask_out(rows, mask))


def masked_difference(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Logprobs - other_logprobs, 0 outside the mask; gradient through `logprobs` only.

    float32, or float64 if `logprobs` is.

    Raises:
        ValueError: the shapes differ.
    """
    inside = mask_out(at_least_float32(logprobs), mask)
    return inside - mask_like(other_logprobs, logprobs, mask)


def mask_like(values: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """`values` detached, 0 outside the mask, in the dtype that a loss of `logprobs` has.

    Args:
        values: [batch, seq], such as advantages.
        logprobs: [batch, seq].
        mask: [batch, seq] bool.

    Raises:
        ValueError: the shapes differ; broadcasting would pair numbers with the wrong tokens.
    """
    if not values.shape == logprobs.shape == mask.shape:
        raise ValueError(
            "expected one number per token, all of the shape of the response mask: got "
            f"{tuple(values.shape)} beside logprobs {tuple(logprobs.shape)} and mask "
            f"{tuple(mask.shape)}"
        )
    return mask_out(values.detach().to(at_least_float32(logprobs).dtype), mask)


def _clamped(difference: Tensor) -> LogRatio:
    is_clamped = difference.detach().abs() > MAX_LOG_RATIO
    return LogRatio(difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), is_clamped)

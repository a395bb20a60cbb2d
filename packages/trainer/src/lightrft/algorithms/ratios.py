"""Log-probability differences that are safe to exponentiate."""

from dataclasses import dataclass

from torch import Tensor

from lightrft.algorithms.masking import at_least_float32, mask_out, masked_row_mean

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


def row_log_ratio(difference: Tensor, mask: Tensor) -> LogRatio:
    """The mean of the differences of a row, repeated on its tokens.

    The mean is clamped, not its terms: a single token beyond 20 counts in full.

    Args:
        difference: [batch, seq] of `masked_difference`, or a bounded form of it.
        mask: [batch, seq] bool.
    """
    means = masked_row_mean(difference, mask).unsqueeze(-1).expand_as(difference)
    return _clamped(mask_out(means, mask))


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

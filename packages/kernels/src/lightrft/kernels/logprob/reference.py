"""All logits at once, differentiated by autograd: the slow definition of `linear_logprob`."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrft.kernels.logprob.types import (
    EntropyMode,
    LogitsTransform,
    LogprobOutput,
    accumulation_dtype,
    compute_logits,
)


def reference_logprob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    transform: LogitsTransform,
    entropy: EntropyMode,
) -> LogprobOutput:
    """Logprobs and entropy from the full [tokens, vocab] logits; no row is ignored.

    Args:
        hidden: [tokens, hidden].
        weight: [vocab, hidden].
        bias: [vocab] or None.
        targets: [tokens] int64, in range.
        transform: Softcap and temperature.
        entropy: Whether to compute the entropy, and whether gradients flow through it.
    """
    dtype = accumulation_dtype(hidden, weight, bias)
    wide_bias = None if bias is None else bias.to(dtype)
    logits = compute_logits(hidden.to(dtype), weight.to(dtype), wide_bias, transform)
    log_probabilities = torch.log_softmax(logits, dim=-1)
    logprobs = log_probabilities.gather(1, targets[:, None]).squeeze(1)
    if entropy == "none":
        return LogprobOutput(logprobs, None)
    source = log_probabilities if entropy == "grad" else log_probabilities.detach()
    # A token of probability 0 adds 0 to the entropy, where 0 * -inf would be NaN.
    finite = source.masked_fill(source.detach() == -torch.inf, 0.0)
    return LogprobOutput(logprobs, -(source.exp() * finite).sum(-1))

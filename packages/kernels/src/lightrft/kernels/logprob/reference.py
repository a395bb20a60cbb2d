"""All logits at once, differentiated by autograd: the slow definition of `linear_logprob`."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrft.kernels.logprob.types import (
    EntropyMode,
    LogprobOutput,
    OutputLayer,
    accumulation_dtype,
    apply_transform,
)


def reference_logprob(
    hidden: Tensor, layer: OutputLayer, targets: Tensor, *, entropy: EntropyMode
) -> LogprobOutput:
    """Logprobs and entropy from the full [tokens, vocab] logits; no row is ignored.

    Args:
        hidden: [tokens, hidden].
        layer: Of the whole vocabulary.
        targets: [tokens] int64, in range.
        entropy: Whether to compute the entropy, and whether gradients flow through it.
    """
    dtype = accumulation_dtype(hidden, layer.weight, layer.bias)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    logits = apply_transform(hidden.to(dtype) @ layer.weight.to(dtype).T, bias, layer.transform)
    log_probabilities = torch.log_softmax(logits, dim=-1)
    logprobs = log_probabilities.gather(1, targets[:, None]).squeeze(1)
    if entropy == "none":
        return LogprobOutput(logprobs, None)
    source = log_probabilities if entropy == "grad" else log_probabilities.detach()
    # A token of probability 0 adds 0 to the entropy, where 0 * -inf would be NaN.
    finite = source.masked_fill(source.detach() == -torch.inf, 0.0)
    return LogprobOutput(logprobs, -(source.exp() * finite).sum(-1))

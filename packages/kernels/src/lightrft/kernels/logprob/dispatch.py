"""Public `linear_logprob`, and its definition."""

import torch
from torch import Tensor

from lightrft.kernels.logprob.operators import logprob_forward
from lightrft.kernels.logprob.rows import select_rows
from lightrft.kernels.logprob.types import (
    EntropyMode,
    LogitsTransform,
    LogprobImplementation,
    LogprobOutput,
    OutputLayer,
    Workspace,
    accumulation_dtype,
    apply_transform,
    leading,
    validate_bounds,
    validate_options,
    validate_tensors,
)


def reference_logprob(
    hidden: Tensor, layer: OutputLayer, targets: Tensor, *, entropy: EntropyMode
) -> LogprobOutput:
    """Compute logprobs and entropy from the full [tokens, vocab] logits; no row is ignored.

    Args:
        hidden: [tokens, hidden].
        layer: Output layer of the whole vocabulary.
        targets: [tokens] int64, in range.
        entropy: Mode as in `linear_logprob`.
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


def linear_logprob(  # noqa: PLR0913 - one operation with many independent options
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: EntropyMode = "none",
    impl: LogprobImplementation = "auto",
    workspace: Workspace | None = None,
    num_tokens: int | None = None,
) -> LogprobOutput:
    """Compute the log-probability of each target under a linear output layer, and the entropy.

    logprobs = log_softmax(z)[targets],  z = softcap(hidden @ weight.T + bias) / temperature
    entropy = -sum_v p_v log p_v,  p = softmax(z)

    Products and sums are float32 (float64 if an input is), regardless of autocast. Gradients reach
    hidden, weight and bias; rows without an upstream gradient cost nothing in the backward pass.
    Equal calls give equal bits (on CUDA set CUBLAS_WORKSPACE_CONFIG).

    Args:
        hidden: [tokens, hidden]; tokens may be 0.
        weight, bias: [vocab, hidden], and [vocab] or None; a bias of -inf forbids a token.
        targets: [tokens] int64 in [0, vocab), or `ignore_index`.
        temperature: Divisor of the logits; positive.
        softcap: Bound cap in cap * tanh(logits / cap) before the temperature; positive, or None.
        ignore_index: Target of ignored rows, which have outputs of 0 and no gradient.
        entropy: Mode: "none", "value" (detached) or "grad".
        impl: Implementation; see `LogprobImplementation`.
        workspace: Chunk size; None takes the default.
        num_tokens: Number of leading rows of the weight that are tokens; the others get no
            probability and a gradient of 0. None takes all.

    Raises:
        ValueError: A shape, dtype, target or option is invalid or unsupported here.
    """
    validate_tensors(hidden, weight, targets, bias)
    validate_options(temperature, softcap, entropy, impl)
    transform = LogitsTransform.of(temperature, softcap)
    if impl == "reference":
        layer = OutputLayer(weight[:num_tokens], leading(bias, num_tokens), transform)
        if workspace is not None:
            raise ValueError("impl='reference' is all logits at once: pass workspace=None")
        return _reference(hidden, layer, targets, ignore_index, entropy)
    if workspace is None:
        # On a CPU chunks should fit the caches; on a GPU each costs a pass over dL/dhidden.
        workspace = Workspace(16384) if hidden.is_cuda else Workspace()
    options = (transform.temperature, transform.softcap, ignore_index, entropy, impl)
    logprobs, entropies, _, _ = logprob_forward(
        hidden, weight, bias, targets, *options, workspace.chunk_columns, num_tokens
    )
    return LogprobOutput(logprobs, None if entropy == "none" else entropies)


def _reference(
    hidden: Tensor, layer: OutputLayer, targets: Tensor, ignore_index: int, entropy: EntropyMode
) -> LogprobOutput:
    """Compute `reference_logprob` of the rows that count, in their places; 0 elsewhere."""
    chosen = select_rows(targets != ignore_index, targets, is_static=False)
    validate_bounds(chosen.smallest, chosen.largest, layer.weight.shape[0], ignore_index)
    with torch.autocast(hidden.device.type, enabled=False):
        output = reference_logprob(
            chosen.take(hidden), layer, chosen.take(targets), entropy=entropy
        )
    entropies = None if output.entropy is None else chosen.spread(output.entropy)
    return LogprobOutput(chosen.spread(output.logprobs), entropies)

"""The public `linear_logprob`: checks its arguments once and picks an implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrft.kernels.logprob import validation
from lightrft.kernels.logprob.operators import logprob_forward
from lightrft.kernels.logprob.types import (
    Determinism,
    EntropyMode,
    LogitsTransform,
    LogprobImplementation,
    LogprobOutput,
    OutputLayer,
    Precision,
    VocabShard,
    Workspace,
    accumulation_dtype,
    apply_transform,
)

if TYPE_CHECKING:
    from lightrft.kernels.logprob.sharding import LocalProblem


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
    precision: Precision = "fp32",
    deterministic: Determinism = True,
    tp: VocabShard | None = None,
    workspace: Workspace | None = None,
) -> LogprobOutput:
    """Log-probability of each target under a linear output layer, and the entropy.

    logprobs = log_softmax(z)[targets],  z = softcap(hidden @ weight.T + bias) / temperature
    entropy = -sum_v p_v log p_v,  p = softmax(z)

    Products and sums are float32 (float64 if an input is), whatever autocast says. Gradients reach
    hidden, weight and bias; rows without an upstream gradient cost nothing in the backward pass.

    Args:
        hidden: [tokens, hidden]; tokens may be 0.
        weight, bias: [vocab, hidden], and [vocab] or None; this rank's part with `tp`.
        targets: [tokens] int64 in [0, vocab), or `ignore_index`.
        temperature: Divides the logits; positive.
        softcap: cap * tanh(logits / cap) before the temperature; positive, or None.
        ignore_index: Rows with this target give 0 for both outputs and no gradient.
        entropy: "none", "value" (detached) or "grad".
        impl, precision, deterministic: See `LogprobImplementation`, `Precision`, `Determinism`.
        tp: The part of the vocabulary that `weight` is, see `VocabShard`; None is all of it, or
            what the placements say where the tensors are DTensors, all of them.
        workspace: Chunk size, and where dL/dweight goes; None takes the defaults.

    Raises:
        ValueError: A shape, dtype, target or option is invalid or cannot be honoured here.
    """
    validation.validate_tensors(hidden, weight, targets, bias)
    validation.validate_options(temperature, softcap, entropy, impl, precision, deterministic)
    validation.validate_workspace(workspace, weight)
    layer = OutputLayer(weight, bias, LogitsTransform.of(temperature, softcap))
    if impl == "reference":
        validation.refuse_with_reference(precision, deterministic, tp, workspace)
        return _reference(hidden, layer, targets, ignore_index, entropy)
    workspace = workspace or _default_workspace(hidden)
    problem = _local_problem(hidden, weight, targets, bias, tp, workspace)
    if problem is not None:
        hidden, weight, targets, bias, tp = problem.arguments
    shard = tp or VocabShard(None, 0, weight.shape[0])
    logprobs, entropies, _, _ = logprob_forward(
        hidden,
        weight,
        bias,
        targets,
        workspace.grad_weight,
        layer.transform.temperature,
        layer.transform.softcap,
        ignore_index,
        entropy,
        impl,
        precision,
        str(deterministic),
        workspace.chunk_columns,
        shard.start,
        shard.vocab_size,
        tp and tp.group_name,
    )
    if problem is not None:
        logprobs, entropies = problem.distribute(logprobs), problem.distribute(entropies)
    return LogprobOutput(logprobs, None if entropy == "none" else entropies)


def _default_workspace(hidden: Tensor) -> Workspace:
    # Chunks of a CPU should fit its caches; on a GPU each one costs a pass over dL/dhidden.
    return Workspace(16384) if hidden.is_cuda else Workspace()


def _local_problem(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    tp: VocabShard | None,
    workspace: Workspace,
) -> LocalProblem | None:
    """What this rank computes of DTensors, or None for plain tensors.

    With replicated tokens a weight that is split over its rows is the vocabulary of `tp`; else the
    weight is gathered and ranks compute their own tokens.
    """
    if all(type(tensor).__name__ != "DTensor" for tensor in (hidden, weight, targets, bias)):
        return None
    from lightrft.kernels.logprob.sharding import localize

    validation.refuse_with_dtensors(tp, workspace)
    return localize(hidden, weight, targets, bias)


def _reference(
    hidden: Tensor, layer: OutputLayer, targets: Tensor, ignore_index: int, entropy: EntropyMode
) -> LogprobOutput:
    """`reference_logprob` of the rows that count, in their places; 0 elsewhere."""
    num_tokens = len(targets)
    active = (targets != ignore_index).nonzero().squeeze(1)
    validation.validate_targets(targets[active], layer.weight.shape[0], ignore_index)
    if len(active) < len(targets):
        hidden, targets = hidden[active], targets[active]
    with torch.autocast(hidden.device.type, enabled=False):
        output = reference_logprob(hidden, layer, targets, entropy=entropy)
    if len(active) == num_tokens:
        return output

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(num_tokens).index_copy(0, active, values)

    entropies = None if output.entropy is None else spread(output.entropy)
    return LogprobOutput(spread(output.logprobs), entropies)

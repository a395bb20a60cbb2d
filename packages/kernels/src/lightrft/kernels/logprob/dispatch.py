"""The public `linear_logprob`: checks its arguments once and picks an implementation."""

import torch
from torch import Tensor

from lightrft.kernels.logprob import validation
from lightrft.kernels.logprob.autograd import LogprobEngine, LogprobOptions, engine_logprob
from lightrft.kernels.logprob.selection import Request, pick_fastest, select_engines
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

    Products and sums are float32 (float64 if an input is), whatever autocast says. Gradients
    reach hidden, weight and bias, in the dtype of each, for any upstream gradient per token. Rows
    without an upstream gradient cost nothing in the backward pass.

    Args:
        hidden: [tokens, hidden]; tokens may be 0.
        weight: [vocab, hidden]; this rank's rows with `tp`.
        targets: [tokens] int64 in [0, vocab), or `ignore_index`.
        bias: [vocab] or None; this rank's part with `tp`.
        temperature: Divides the logits; positive.
        softcap: cap * tanh(logits / cap) before the temperature; positive, or None.
        ignore_index: Rows with this target give 0 for both outputs and no gradient.
        entropy: "none", "value" (detached) or "grad".
        impl, precision, deterministic: See `LogprobImplementation`, `Precision`, `Determinism`.
        tp: The part of the vocabulary that `weight` is, see `VocabShard`; None is all of it.
        workspace: Chunk size, and where dL/dweight goes; None takes the defaults.

    Raises:
        ValueError: A shape, dtype, target or option is invalid or cannot be honoured here.
    """
    validation.validate_tensors(hidden, weight, targets, bias)
    validation.validate_options(temperature, softcap, entropy, impl, precision, deterministic)
    validation.validate_workspace(workspace, weight)
    if impl == "reference":
        validation.refuse_with_reference(precision, deterministic, tp, workspace)
    # Chunks of a CPU should fit its caches; on a GPU each one costs a pass over dL/dhidden.
    workspace = workspace or (Workspace(16384) if hidden.is_cuda else Workspace())
    active = (targets != ignore_index).nonzero().squeeze(1)
    num_tokens = len(targets)
    if len(active) < num_tokens:
        hidden, targets = hidden[active], targets[active]
    validation.validate_targets(targets, len(weight) if tp is None else tp.vocab_size, ignore_index)
    layer = OutputLayer(weight, bias, LogitsTransform.of(temperature, softcap))
    columns = workspace.chunk_columns
    request = Request(impl, precision, deterministic, entropy, softcap is not None, columns)
    with torch.autocast(hidden.device.type, enabled=False):
        output = _compute(hidden, layer, targets, request, workspace, tp)
    return output if len(active) == num_tokens else _spread(output, active, num_tokens)


def _compute(
    hidden: Tensor,
    layer: OutputLayer,
    targets: Tensor,
    request: Request,
    workspace: Workspace,
    tp: VocabShard | None,
) -> LogprobOutput:
    if request.impl == "reference":
        return reference_logprob(hidden, layer, targets, entropy=request.entropy)
    weight, bias = layer.weight, layer.bias
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    if tp is not None:
        num_rows = max(0, tp.vocab_size - tp.start)  # rows beyond are padding
        weight, bias = weight[:num_rows], None if bias is None else bias[:num_rows]
        targets = targets - tp.start
    engines = select_engines(request, hidden, weight)
    engine = engines[0]
    if len(engines) > 1:
        part = OutputLayer(weight, bias, layer.transform)
        engine = _fastest(engines, hidden, part, targets, needs_entropy=request.needs_entropy)
    options = LogprobOptions(engine, layer.transform, request.entropy, tp, workspace.grad_weight)
    return engine_logprob(hidden, weight, bias, targets, options)


def _fastest(
    engines: list[LogprobEngine],
    hidden: Tensor,
    layer: OutputLayer,
    targets: Tensor,
    *,
    needs_entropy: bool,
) -> LogprobEngine:
    # Tokens are binned to a power of two.
    key = (len(hidden).bit_length(), *layer.weight.shape, hidden.dtype, needs_entropy)

    @torch.no_grad()
    def measure(engine: LogprobEngine) -> float:
        # The first run compiles; only the second one counts.
        for _ in range(2):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            engine.statistics(hidden, layer, targets, needs_entropy=needs_entropy)
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    return pick_fastest(key, engines, measure)


def _spread(output: LogprobOutput, active: Tensor, num_tokens: int) -> LogprobOutput:
    """The outputs of the active rows in their places among all tokens; 0 elsewhere."""

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(num_tokens).index_copy(0, active, values)

    entropy = None if output.entropy is None else spread(output.entropy)
    return LogprobOutput(spread(output.logprobs), entropy)

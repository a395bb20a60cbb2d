"""The public `linear_logprob`: checks its arguments once and picks an implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from lightrft.kernels.logprob.chunked import chunked_logprob
from lightrft.kernels.logprob.reference import reference_logprob
from lightrft.kernels.logprob.types import (
    EntropyMode,
    LogitsLaw,
    LogprobImplementation,
    LogprobOutput,
    Workspace,
)

if TYPE_CHECKING:
    from torch import Tensor

IMPLEMENTATIONS = ("auto", "reference", "chunked")
ENTROPY_MODES = ("none", "value", "grad")


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
    precision: Literal["fp32", "centred"] = "fp32",
    deterministic: bool | Literal["batch_invariant"] = True,
    tp: None = None,
    workspace: Workspace | None = None,
) -> LogprobOutput:
    """Log-probability of each target under a linear output layer, and the entropy.

    logprobs = log_softmax(z)[targets],  z = softcap(hidden @ weight.T + bias) / temperature
    entropy = -sum_v p_v log p_v,  p = softmax(z)

    Products and sums are float32 (float64 if an input is), whatever autocast says. Gradients
    reach hidden, weight and bias, in the dtype of each, for any upstream gradient per token.

    Args:
        hidden: [tokens, hidden]; tokens may be 0.
        weight: [vocab, hidden].
        targets: [tokens] int64 in [0, vocab), or `ignore_index`.
        bias: [vocab] or None.
        temperature: Divides the logits; positive.
        softcap: cap * tanh(logits / cap) before the temperature; positive, or None.
        ignore_index: Rows with this target give 0 for both outputs and no gradient.
        entropy: "none", "value" (detached) or "grad".
        impl: "reference" (all logits at once), "chunked" (chunks of the vocabulary), or "auto".
        precision: Only "fp32" is available on this build.
        deterministic: Both implementations always are; "batch_invariant" is not available.
        tp: Vocabulary shards; not available on this build.
        workspace: Work space of "chunked"; None takes the default.

    Raises:
        ValueError: A shape, dtype, target or option is invalid; the message names it.
    """
    _validate_tensors(hidden, weight, targets, bias)
    _validate_options(temperature, softcap, entropy, impl)
    _refuse_unavailable(impl, precision, deterministic, tp, workspace)
    active = (targets != ignore_index).nonzero().squeeze(1)
    num_tokens = len(targets)
    if len(active) < num_tokens:
        hidden, targets = hidden[active], targets[active]
    _validate_targets(targets, len(weight), ignore_index)
    law = LogitsLaw(float(temperature), None if softcap is None else float(softcap))
    with torch.autocast(hidden.device.type, enabled=False):
        if impl == "reference":
            output = reference_logprob(hidden, weight, bias, targets, law=law, entropy=entropy)
        else:
            columns = (workspace or Workspace()).chunk_columns
            output = chunked_logprob(
                hidden, weight, bias, targets, law=law, entropy=entropy, chunk_columns=columns
            )
    if len(active) == num_tokens:
        return output
    return LogprobOutput(
        _scatter(output.logprobs, active, num_tokens),
        None if output.entropy is None else _scatter(output.entropy, active, num_tokens),
    )


def _scatter(values: Tensor, index: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_copy(0, index, values)


def _validate_tensors(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "expected hidden [tokens, hidden] and weight [vocab, hidden]: got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"expected targets [{len(hidden)}] int64: got {tuple(targets.shape)} {targets.dtype}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias [{len(weight)}]: got {tuple(bias.shape)}")
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must have a floating dtype: got {tensor.dtype}")
    if len(weight) == 0:
        raise ValueError("weight must have at least one row: got an empty vocabulary")


def _validate_options(temperature: float, softcap: float | None, entropy: str, impl: str) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive: got {temperature}; score T = 0 at T = 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None: got {softcap}")
    if entropy not in ENTROPY_MODES:
        raise ValueError(f"unknown entropy {entropy!r}: expected one of {', '.join(ENTROPY_MODES)}")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"unknown impl {impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")


def _refuse_unavailable(
    impl: str, precision: str, deterministic: bool | str, tp: object, workspace: Workspace | None
) -> None:
    if precision != "fp32":
        raise ValueError(f"precision {precision!r} is not available on this build: pass 'fp32'")
    if not isinstance(deterministic, bool):
        raise ValueError(
            f"deterministic={deterministic!r} is not available on this build: pass True or False"
        )
    if tp is not None:
        raise ValueError("vocabulary shards are not available on this build: pass tp=None")
    if workspace is not None and impl == "reference":
        raise ValueError("impl='reference' holds all logits at once: pass workspace=None")


def _validate_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    if targets.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in torch.aminmax(targets))
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(
            f"targets must lie in [0, {vocab_size}) or equal ignore_index={ignore_index}: "
            f"got {wrong}"
        )

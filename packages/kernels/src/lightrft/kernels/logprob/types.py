"""The records of `linear_logprob`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

EntropyMode = Literal["none", "value", "grad"]
# How logprobs are computed: "reference" (all logits at once), "chunked" (torch, chunks of the
# vocabulary), "triton" (fused; 32- or 16-bit floats), "cublas" (stored float32 products; 16-bit
# floats on CUDA), or "auto": a fixed rule, or the fastest if `deterministic` is False.
LogprobImplementation = Literal["auto", "reference", "chunked", "triton", "cublas"]
# Of the logits: "fp32", or "centred": bfloat16 logits, centred on the target's before they are
# rounded. For sampled targets a logprob is off by up to 3e-2 (2e-3 on average) where plain ones
# give 0.2; for unlikely ones by up to |logprob| / 128, for logits beyond 1000 by |logit| / 65536.
# Temperatures below 0.5, which would multiply that, are refused.
Precision = Literal["fp32", "centred"]
# True: the same call gives the same bits (on CUDA set CUBLAS_WORKSPACE_CONFIG). False lets timings
# choose the implementation. "batch_invariant": a row's result does not depend on the other rows.
Determinism = bool | Literal["batch_invariant"]


@dataclass(frozen=True, slots=True)
class LogprobOutput:
    """What `linear_logprob` returns.

    Args:
        logprobs: [tokens] float32 (float64 for float64 inputs).
        entropy: [tokens] likewise, in nats, or None.
    """

    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True, slots=True)
class Workspace:
    """How much of the logits exists at a time, and where the weight's gradient goes.

    Args:
        chunk_columns: Columns of the vocabulary in one chunk; the work space is a few times
            4 * tokens * chunk_columns bytes ("chunked"), or once 2 to 4 bytes for each logit.
        grad_weight: [vocab, hidden] float32. The backward pass adds the weight's gradient to it,
            unrounded, and leaves `weight.grad` alone. None: autograd gets it in weight's dtype.
    """

    chunk_columns: int = 4096
    grad_weight: Tensor | None = None

    def __post_init__(self) -> None:
        if self.chunk_columns < 1:
            raise ValueError(f"chunk_columns must be at least 1: got {self.chunk_columns}")


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The rows of the output layer that one rank of a tensor-parallel group holds.

    Every rank passes the same hidden and targets and receives the same outputs and dL/dhidden. One
    all-gather, and one all-reduce backward.

    Args:
        group: The ranks that hold the vocabulary between them; None is the default group.
        start: First token id of this rank's rows.
        vocab_size: Tokens in the whole vocabulary; rows of ids from here on are padding.
    """

    group: dist.ProcessGroup | None
    start: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.vocab_size < 1:
            raise ValueError(
                "expected start >= 0 and vocab_size >= 1: got "
                f"start={self.start}, vocab_size={self.vocab_size}"
            )

    @property
    def group_name(self) -> str:
        """Name of the group, which an operator takes instead of it; "" is the default group."""
        return "" if self.group is None else self.group.group_name


@dataclass(frozen=True, slots=True)
class LogitsTransform:
    """How logits follow from hidden states: softcap(hidden @ weight.T + bias) / temperature.

    Args:
        temperature: Divides the logits.
        softcap: cap * tanh(logits / cap) before the temperature, or None.
    """

    temperature: float
    softcap: float | None

    @classmethod
    def of(cls, temperature: float, softcap: float | None) -> LogitsTransform:
        """With numbers of any kind made floats."""
        return cls(float(temperature), None if softcap is None else float(softcap))


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """A weight [columns, hidden], its bias [columns] or None, and the transform of its logits."""

    weight: Tensor
    bias: Tensor | None
    transform: LogitsTransform


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is, else float32."""
    is_double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def apply_transform(product: Tensor, bias: Tensor | None, transform: LogitsTransform) -> Tensor:
    """Logits from hidden @ weight.T: [tokens, columns], bias [columns] or None."""
    logits = product if bias is None else product + bias
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return logits if transform.temperature == 1 else logits / transform.temperature

"""The records of `linear_logprob`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EntropyMode = Literal["none", "value", "grad"]
# Ways to compute logprobs: "reference" (all logits at once), "chunked" (torch, chunks of the
# vocabulary), "triton" (fused; 32- or 16-bit floats; a row's result does not depend on the other
# rows), "cublas" (stored float32 products; 16-bit floats on CUDA), or "auto": a fixed rule.
LogprobImplementation = Literal["auto", "reference", "chunked", "triton", "cublas"]


@dataclass(frozen=True, slots=True)
class LogprobOutput:
    """Result of `linear_logprob`.

    Args:
        logprobs: [tokens] float32 (float64 for float64 inputs).
        entropy: [tokens] likewise, in nats, or None.
    """

    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True, slots=True)
class Workspace:
    """Part of the logits that exists at a time.

    Args:
        chunk_columns: Columns of the vocabulary in one chunk; the work space is a few times
            4 * tokens * chunk_columns bytes ("chunked"), or once 2 to 4 bytes for each logit.
    """

    chunk_columns: int = 4096

    def __post_init__(self) -> None:
        if self.chunk_columns < 1:
            raise ValueError(f"chunk_columns must be at least 1: got {self.chunk_columns}")


@dataclass(frozen=True, slots=True)
class LogitsTransform:
    """Logits from hidden states: softcap(hidden @ weight.T + bias) / temperature.

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

"""The records of `linear_logprob`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

EntropyMode = Literal["none", "value", "grad"]
LogprobImplementation = Literal["auto", "reference", "chunked"]


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
    """How much of the logits exists at a time.

    Args:
        chunk_columns: Columns of the vocabulary in one chunk; the work space is
            4 * tokens * chunk_columns bytes, a few times over.
    """

    chunk_columns: int = 4096

    def __post_init__(self) -> None:
        if self.chunk_columns < 1:
            raise ValueError(f"chunk_columns must be at least 1: got {self.chunk_columns}")


@dataclass(frozen=True, slots=True)
class LogitsLaw:
    """How logits follow from hidden states: softcap(hidden @ weight.T + bias) / temperature.

    Args:
        temperature: Divides the logits.
        softcap: cap * tanh(logits / cap) before the temperature, or None.
    """

    temperature: float
    softcap: float | None


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is, else float32."""
    is_double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def compute_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, law: LogitsLaw) -> Tensor:
    """Logits of some columns, all in the dtype of the inputs.

    Args:
        hidden: [tokens, hidden].
        weight: [columns, hidden].
        bias: [columns] or None.
        law: Softcap and temperature.

    Returns:
        [tokens, columns].
    """
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    if law.softcap is not None:
        logits = law.softcap * torch.tanh(logits / law.softcap)
    return logits / law.temperature

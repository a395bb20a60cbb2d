"""Records of `linear_logprob`, and checks of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

EntropyMode = Literal["none", "value", "grad"]
# Ways to compute logprobs: "reference" (all logits at once), "chunked" (torch, chunks of the
# vocabulary), "triton" (fused; float32 or bfloat16; a row's result does not depend on the other
# rows), "cublas" (stored float32 products; bfloat16 on CUDA), or "auto": a fixed rule.
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
    """Part of the logits that is stored at a time.

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
        temperature: Divisor of the logits.
        softcap: Bound cap in cap * tanh(logits / cap) before the temperature, or None.
    """

    temperature: float
    softcap: float | None

    @classmethod
    def of(cls, temperature: float, softcap: float | None) -> LogitsTransform:
        """Convert numbers of any type to floats."""
        return cls(float(temperature), None if softcap is None else float(softcap))


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Weight [columns, hidden], bias [columns] or None, and transform of the logits."""

    weight: Tensor
    bias: Tensor | None
    transform: LogitsTransform


def leading(tensor: Tensor | None, num_tokens: int | None) -> Tensor | None:
    """Return the rows that are tokens; None takes all."""
    return tensor if tensor is None or num_tokens is None else tensor[:num_tokens]


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return float64 if any tensor is, else float32."""
    is_double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def apply_transform(product: Tensor, bias: Tensor | None, transform: LogitsTransform) -> Tensor:
    """Compute logits from hidden @ weight.T [tokens, columns] and bias [columns] or None."""
    logits = product if bias is None else product + bias
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
        if bias is not None:  # -inf forbids a token, capped or not
            logits = logits.masked_fill(bias == -torch.inf, -torch.inf)
    return logits if transform.temperature == 1 else logits / transform.temperature


def validate_tensors(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """Check that shapes and dtypes of the inputs agree."""
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


def validate_options(temperature: float, softcap: float | None, entropy: str, impl: str) -> None:
    """Check that numbers are in range and names are known."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive: got {temperature}; score T = 0 at T = 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None: got {softcap}")
    for name, value, known in (
        ("entropy", entropy, get_args(EntropyMode)),
        ("impl", impl, get_args(LogprobImplementation)),
    ):
        if value not in known:
            raise ValueError(f"unknown {name} {value!r}: expected one of {', '.join(known)}")


def validate_bounds(smallest: int, largest: int, vocab_size: int, ignore_index: int | None) -> None:
    """Check that the smallest and the largest target that count lie in the vocabulary."""
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        others = "" if ignore_index is None else f" or equal ignore_index={ignore_index}"
        raise ValueError(f"targets must lie in [0, {vocab_size}){others}: got {wrong}")

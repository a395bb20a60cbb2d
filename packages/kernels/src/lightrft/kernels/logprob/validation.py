"""Checks of arguments, once, before anything is computed."""

from typing import get_args

import torch
from torch import Tensor

from lightrft.kernels.logprob.types import EntropyMode, LogprobImplementation


def validate_tensors(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """Shapes and dtypes of the inputs agree."""
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
    """Numbers are in range and names are known."""
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


def validate_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Every target that counts is a token of the vocabulary."""
    if targets.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in torch.aminmax(targets))
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(
            f"targets must lie in [0, {vocab_size}) or equal ignore_index={ignore_index}: "
            f"got {wrong}"
        )

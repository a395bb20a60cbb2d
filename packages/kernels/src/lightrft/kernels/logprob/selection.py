"""Choice of the engine for a call."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrft.kernels.logprob.blocks import ChunkedEngine
from lightrft.kernels.logprob.passes import LogprobEngine
from lightrft.kernels.logprob.product_engine import ProductEngine
from lightrft.kernels.logprob.types import LogprobImplementation, OutputLayer

if TYPE_CHECKING:
    from lightrft.kernels.logprob.triton_launch import TritonEngine

# Below this hidden size a pass over stored products costs too much relative to the products.
_MIN_PRODUCT_HIDDEN = 2048
# Engines registered under names.
_named: dict[str, LogprobEngine] = {}


def name_engine(engine: LogprobEngine) -> str:
    """Return a value of the operators' `impl` for this engine, for tests and benchmarks."""
    name = repr(engine)
    _named[name] = engine
    return name


def choose_engine(
    impl: str, hidden: Tensor, layer: OutputLayer, *, entropy: str, chunk_columns: int
) -> LogprobEngine:
    """Return the engine for a call, the same one for its forward and backward pass.

    Args:
        impl, entropy: Arguments of `linear_logprob`, or a name from `name_engine`.
        hidden: [tokens, hidden], all rows.
        layer: Output layer.
        chunk_columns: Columns of one chunk.

    Raises:
        ValueError: The implementation cannot run here; the message says why.
    """
    if impl in _named:
        return _named[impl]
    weight = layer.weight
    if impl == "triton":
        _require(why_not_triton(hidden, weight), impl)
    if impl == "cublas":
        _require(why_not_cublas(hidden, weight), impl)
    if impl == "auto":
        impl = automatic_choice(hidden, weight)
    if impl == "chunked":
        return ChunkedEngine(chunk_columns)
    if impl == "cublas":
        return _product_engine(hidden, weight, chunk_columns)
    return _triton_engine(hidden, layer, entropy, chunk_columns)


def choose_loss_engine(
    hidden: Tensor, weight: Tensor, *, chunk_columns: int
) -> ProductEngine | ChunkedEngine:
    """Return the engine of a loss inside the output layer, which stores logits or products."""
    if hidden.is_cuda and has_triton():
        return _product_engine(hidden, weight, chunk_columns)
    return ChunkedEngine(chunk_columns)


def automatic_choice(hidden: Tensor, weight: Tensor) -> LogprobImplementation:
    """Return the implementation for "auto", by a fixed rule: equal calls give equal bits."""
    if not hidden.is_cuda:
        # Plain torch, in blocks of logits that fit a CPU's caches.
        return "chunked"
    if splits_weight(hidden, weight) and has_triton():
        # Exact logits from three products of bfloat16 parts, each about 15 times as fast as a
        # float32 product.
        return "cublas"
    if why_not_cublas(hidden, weight) is not None:
        # Plain products, without Triton or for dtypes whose tensor-core products are not exact.
        return "chunked"
    # A pass over stored products is cheap relative to products of this hidden size. With a smaller
    # one it would take as long as the products.
    return "cublas" if hidden.shape[1] >= _MIN_PRODUCT_HIDDEN else "triton"


def why_not_triton(hidden: Tensor, weight: Tensor) -> str | None:
    """Return why the Triton kernels cannot process these tensors here, or None if they can."""
    if not has_triton():
        return "Triton is not installed"
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.bfloat16):
        return (
            "it needs hidden and weight both in float32 or both in bfloat16: got "
            f"{hidden.dtype} and {weight.dtype}"
        )
    if not hidden.is_cuda and not _is_interpreted():
        return (
            "it needs CUDA tensors; on the CPU it runs only in Triton's interpreter, with "
            "TRITON_INTERPRET=1 set before the start"
        )
    return None


def why_not_cublas(hidden: Tensor, weight: Tensor) -> str | None:
    """Return why stored float32 products cannot process these tensors here, or None."""
    if not has_triton():
        return "Triton is not installed"
    if not hidden.is_cuda:
        return "it needs CUDA tensors"
    if not hidden.dtype == weight.dtype == torch.bfloat16:
        return f"it needs hidden and weight in bfloat16: got {hidden.dtype} and {weight.dtype}"
    return None


def _require(reason: str | None, impl: str) -> None:
    if reason is not None:
        raise ValueError(
            f"impl={impl!r} is not available here: {reason}; pass impl='chunked' or 'auto'"
        )


@cache
def has_triton() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _is_interpreted() -> bool:
    from lightrft.kernels.logprob import triton_launch

    return triton_launch.is_interpreted()


def splits_weight(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether a float32 weight is split into bfloat16 parts."""
    is_mixed = hidden.dtype == torch.bfloat16 and weight.dtype == torch.float32
    return hidden.is_cuda and is_mixed


def _product_engine(hidden: Tensor, weight: Tensor, chunk_columns: int) -> ProductEngine:
    return ProductEngine(chunk_columns, splits_weight(hidden, weight))


def _triton_engine(
    hidden: Tensor, layer: OutputLayer, entropy: str, chunk_columns: int
) -> TritonEngine:
    from lightrft.kernels.logprob import triton_launch

    is_half = hidden.dtype == torch.bfloat16
    capability = torch.cuda.get_device_capability(hidden.device) if hidden.is_cuda else (8, 0)
    # Rows that start at multiples of 16 bytes are loaded in vectors.
    is_aligned = all(
        tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
        for tensor in (hidden, layer.weight)
    )
    is_plain = layer.bias is None and layer.transform.softcap is None
    plain = triton_launch.plain_tiles(capability, is_half=is_half, is_aligned=is_aligned)
    gradient = triton_launch.gradient_tiles(
        capability,
        is_half=is_half,
        is_aligned=is_aligned,
        is_plain=is_plain and entropy != "grad",
    )
    return triton_launch.TritonEngine(chunk_columns, plain, gradient)

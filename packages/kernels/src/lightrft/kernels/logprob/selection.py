"""Which implementation serves a call: what can run, what is asked for, what is remembered."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from lightrft.kernels.logprob.chunked_engine import ChunkedEngine
from lightrft.kernels.logprob.passes import LogprobEngine
from lightrft.kernels.logprob.product_engine import ProductEngine
from lightrft.kernels.logprob.products import cpu_multiplies_bfloat16, may_round_partial_sums
from lightrft.kernels.logprob.self_tests import (
    centred_products_are_right,
    run_once,
    working_bulk_gradient_tiles,
    working_bulk_tiles,
)
from lightrft.kernels.logprob.types import (
    Determinism,
    EntropyMode,
    LogprobImplementation,
    OutputLayer,
    Precision,
    accumulation_dtype,
)

if TYPE_CHECKING:
    from lightrft.kernels.logprob.triton_launch import TritonEngine

_HALVES = (torch.bfloat16, torch.float16)
# Below this hidden size a pass over stored products costs too much beside the products.
_MIN_PRODUCT_HIDDEN = 2048
_MIN_CENTRED_TEMPERATURE = 0.5


@dataclass(frozen=True, slots=True)
class Request:
    """What a call asks for, without its data.

    Args:
        impl, precision, deterministic: The arguments of `linear_logprob`.
        entropy: Likewise.
        temperature: Divides the logits.
        has_bias, has_softcap: Whether logits have a bias, and whether they are capped.
        chunk_columns: Columns of one chunk.
    """

    impl: LogprobImplementation
    precision: Precision
    deterministic: Determinism
    entropy: EntropyMode
    temperature: float
    has_bias: bool
    has_softcap: bool
    chunk_columns: int

    @classmethod
    def of(
        cls,
        impl: str,
        precision: str,
        deterministic: str,
        entropy: str,
        *,
        temperature: float,
        has_bias: bool,
        has_softcap: bool,
        chunk_columns: int,
    ) -> Request:
        """From an operator's arguments, checked before."""
        return cls(
            cast(LogprobImplementation, impl),
            cast(Precision, precision),
            _DETERMINISM[deterministic],
            cast(EntropyMode, entropy),
            temperature,
            has_bias,
            has_softcap,
            chunk_columns,
        )

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy is computed."""
        return self.entropy != "none"


# An operator's argument is a string.
_DETERMINISM: dict[str, Determinism] = {
    "True": True,
    "False": False,
    "batch_invariant": "batch_invariant",
}
_chosen: dict[Hashable, int] = {}
# Engines that are asked for by a name of their own.
_named: dict[str, LogprobEngine] = {}


def name_engine(engine: LogprobEngine) -> str:
    """A value of the operators' `impl` that means this very engine, for tests and benchmarks."""
    name = repr(engine)
    _named[name] = engine
    return name


def choose_engine(request: Request, hidden: Tensor, layer: OutputLayer) -> LogprobEngine:
    """The engine that serves the call; the same one in its forward and its backward pass.

    Args:
        request: What is asked for.
        hidden: [tokens, hidden], all rows.
        layer: This rank's columns.
    """
    if request.impl in _named:
        return _named[request.impl]
    engines = select_engines(request, hidden, layer.weight)
    # Nothing can be timed where there is nothing to compute.
    if len(engines) == 1 or len(hidden) == 0 or len(layer.weight) == 0:
        return engines[0]
    # Tokens are binned to a power of two.
    key = (len(hidden).bit_length(), *layer.weight.shape, hidden.dtype, request.entropy)

    def measure(engine: LogprobEngine) -> float:
        # The first run compiles; only the second one counts.
        for _ in range(2):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            run_once(engine, hidden, layer, request.entropy)
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    return pick_fastest(key, engines, measure)


def pick_fastest(
    key: Hashable, candidates: list[LogprobEngine], measure: Callable[[LogprobEngine], float]
) -> LogprobEngine:
    """The candidate that took the least time when the key was first met in this process.

    Args:
        key: What calls that share a choice have in common.
        candidates: At least one, in the same order at every call.
        measure: Runs a candidate and gives its seconds; called only the first time.
    """
    if key not in _chosen:
        seconds = [measure(candidate) for candidate in candidates]
        _chosen[key] = seconds.index(min(seconds))
    return candidates[_chosen[key]]


def select_engines(request: Request, hidden: Tensor, weight: Tensor) -> list[LogprobEngine]:
    """Engines that may serve the call, the preferred one first.

    Raises:
        ValueError: What is asked for cannot be had here; the message says why.
    """
    if request.precision == "centred":
        return [_centred_engine(request, hidden, weight)]
    if request.deterministic == "batch_invariant":
        return [_batch_invariant_engine(request, hidden, weight)]
    if request.impl == "chunked":
        return [_chunked_engine(request, hidden, weight)]
    if request.impl == "triton":
        _require(why_not_triton(hidden, weight), "impl='triton'", "'chunked'")
        return [_triton_engine(request, hidden, weight)]
    if request.impl == "cublas":
        _require(why_not_cublas(hidden, weight), "impl='cublas'", "'chunked'")
        return [_product_engine(request, is_centred=False)]
    return _automatic(request, hidden, weight)


def select_loss_engine(
    request: Request, hidden: Tensor, weight: Tensor
) -> ProductEngine | ChunkedEngine:
    """The engine of a loss inside the output layer, which stores logits or products.

    Raises:
        ValueError: What is asked for cannot be had here; the message says why.
    """
    if request.precision == "centred":
        return _centred_engine(request, hidden, weight)
    if hidden.is_cuda:
        is_split = splits_weight(hidden, weight)
        return _product_engine(request, is_centred=False, splits_weight=is_split)
    return _chunked_engine(request, hidden, weight)


@dataclass(frozen=True, slots=True)
class LossWorkspace:
    """What a loss inside the output layer may store on a kind of device.

    Args:
        budget_bytes: Logits stored at a time, unless `min_tokens` need more.
        min_tokens: Tokens of a chunk below which products are slow.
        max_tokens: Beyond them a longer chunk gains nothing.
        reason: Why these numbers.
    """

    budget_bytes: int
    min_tokens: int
    max_tokens: int
    reason: str


WORKSPACES = {
    "cuda": LossWorkspace(
        2**31, 1024, 8192, "2 GiB, little beside the weights' gradient in float32"
    ),
    "cpu": LossWorkspace(
        2**26, 256, 1024, "64 MiB: more is no faster, fewer than 256 tokens multiply slowly"
    ),
}


@dataclass(frozen=True, slots=True)
class LossPlan:
    """How a loss inside the output layer is cut.

    Args:
        chunk_tokens: Most tokens of a chunk.
        budget_bytes: Logits stored at a time.
        num_products: Matrix products in units of one over all tokens: 3 where all logits of a
            chunk are stored, up to 4 where all are computed twice.
    """

    chunk_tokens: int
    budget_bytes: int
    num_products: float


def plan_loss(
    num_tokens: int,
    hidden: Tensor,
    weight: Tensor,
    *,
    precision: Precision = "fp32",
    chunk_tokens: int | None = None,
    budget_bytes: int | None = None,
) -> LossPlan:
    """Chunks of tokens whose logits fit the budget, all of about the same size.

    Args:
        num_tokens: Those that count.
        hidden, weight: Of the call; their device, dtype and number of columns are looked at.
        precision: Of the logits, which says how large a stored one is.
        chunk_tokens, budget_bytes: What the caller wants; None leaves it to `WORKSPACES`.
    """
    space = WORKSPACES["cuda" if hidden.is_cuda else "cpu"]
    itemsize = 2 if precision == "centred" else accumulation_dtype(hidden, weight).itemsize
    row_bytes = max(1, len(weight) * itemsize)
    budget = space.budget_bytes if budget_bytes is None else budget_bytes
    if chunk_tokens is None:
        most = min(max(budget // row_bytes, space.min_tokens), space.max_tokens)
        num_chunks = max(1, -(-num_tokens // most))
        chunk_tokens = max(1, -(-num_tokens // num_chunks))
    needed = chunk_tokens * row_bytes
    if budget_bytes is None and not hidden.is_cuda:
        budget = needed
    return LossPlan(chunk_tokens, budget, 4.0 - min(1.0, budget / needed))


def why_not_triton(hidden: Tensor, weight: Tensor) -> str | None:
    """Why the Triton kernels cannot serve these tensors here, or None if they can."""
    if not has_triton():
        return "Triton is not installed"
    if hidden.dtype != weight.dtype or hidden.dtype == torch.float64:
        return (
            "it needs hidden and weight in one of float32, bfloat16, float16: got "
            f"{hidden.dtype} and {weight.dtype}"
        )
    if not hidden.is_cuda and not _is_interpreted():
        return (
            "it needs CUDA tensors; on the CPU it runs only in Triton's interpreter, with "
            "TRITON_INTERPRET=1 set before the start"
        )
    return None


def why_not_cublas(hidden: Tensor, weight: Tensor) -> str | None:
    """Why stored float32 products cannot serve these tensors here, or None if they can."""
    if not hidden.is_cuda:
        return "it needs CUDA tensors"
    if hidden.dtype != weight.dtype or hidden.dtype not in _HALVES:
        return (
            "it needs hidden and weight in bfloat16 or float16: got "
            f"{hidden.dtype} and {weight.dtype}"
        )
    return None


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _is_interpreted() -> bool:
    from lightrft.kernels.logprob import triton_launch

    return triton_launch.is_interpreted()


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table by which `impl="auto"` chooses; the first that applies does.

    Args:
        engine: What serves the call, see `LogprobImplementation`.
        reason: Why, in words.
        applies: Whether the row is about such a call.
    """

    engine: LogprobImplementation
    reason: str
    applies: Callable[[Tensor, Tensor], bool]


RULES = (
    Rule(
        "chunked",
        "a CPU: plain torch, in blocks of logits that stay in its caches",
        lambda hidden, weight: not hidden.is_cuda,
    ),
    Rule(
        "cublas",
        "a float32 weight beside bfloat16 hidden states: exact logits from three products of "
        "bfloat16 parts, each about 15 times as fast as a float32 product",
        lambda hidden, weight: splits_weight(hidden, weight),
    ),
    Rule(
        "chunked",
        "no tensor-core product is exact for these dtypes: float32 or float64 products",
        lambda hidden, weight: hidden.dtype not in _HALVES or hidden.dtype != weight.dtype,
    ),
    Rule(
        "cublas",
        "Triton cannot run here: library products, with passes in torch",
        lambda hidden, weight: why_not_triton(hidden, weight) is not None,
    ),
    Rule(
        "cublas",
        f"hidden size of at least {_MIN_PRODUCT_HIDDEN}: a pass over stored products is little "
        "beside the products",
        lambda hidden, weight: hidden.shape[1] >= _MIN_PRODUCT_HIDDEN,
    ),
    Rule(
        "triton",
        f"hidden size below {_MIN_PRODUCT_HIDDEN}: stored products would take as long as their "
        "computation",
        lambda hidden, weight: True,
    ),
)


def splits_weight(hidden: Tensor, weight: Tensor) -> bool:
    """Whether a float32 weight is taken apart into bfloat16 parts."""
    is_mixed = hidden.dtype == torch.bfloat16 and weight.dtype == torch.float32
    return hidden.is_cuda and is_mixed


def explain(
    hidden: Tensor, weight: Tensor, *, num_tokens: int | None = None, loss_inside: bool = False
) -> str:
    """Which implementation the defaults choose for such tensors, and why: one line.

    Args:
        hidden, weight: As for `linear_logprob`; only device, dtype and shape are looked at, so that
            they may lie on the device "meta" or be fake.
        num_tokens: Tokens of a call; None are those of `hidden`.
        loss_inside: Explain `linear_policy_loss`.
    """
    if not loss_inside:
        rule = next(rule for rule in RULES if rule.applies(hidden, weight))
        return f"{rule.engine}: {rule.reason}"
    kind = "cuda" if hidden.is_cuda else "cpu"
    plan = plan_loss(len(hidden) if num_tokens is None else num_tokens, hidden, weight)
    engine = "cublas" if hidden.is_cuda else "chunked"
    return (
        f"{engine}: {plan.num_products:.2f} products in chunks of {plan.chunk_tokens} tokens, "
        f"{plan.budget_bytes / 2**20:.0f} MiB of logits ({WORKSPACES[kind].reason})"
    )


def _automatic(request: Request, hidden: Tensor, weight: Tensor) -> list[LogprobEngine]:
    """By the table; more than one engine only where timing may decide."""
    rule = next(rule for rule in RULES if rule.applies(hidden, weight))
    if rule.engine == "chunked":
        return [_chunked_engine(request, hidden, weight)]
    products = _product_engine(
        request, is_centred=False, splits_weight=splits_weight(hidden, weight)
    )
    if why_not_triton(hidden, weight) is not None:
        return [products]
    fused = _triton_engine(request, hidden, weight)
    ordered: list[LogprobEngine] = (
        [products, fused]
        if rule.engine == "cublas"
        else [
            fused,
            products,
        ]
    )
    if request.deterministic is not False:
        return ordered[:1]
    candidate = _bulk_gradient_engine(request, fused, hidden, weight)
    return ordered if candidate is None else [*ordered, candidate]


def _centred_engine(request: Request, hidden: Tensor, weight: Tensor) -> ProductEngine:
    what = "precision='centred'"
    reason = None
    if hidden.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        reason = f"it needs hidden and weight in bfloat16: got {hidden.dtype} and {weight.dtype}"
    elif request.has_softcap:
        reason = "softcap needs the logits themselves"
    elif request.temperature < _MIN_CENTRED_TEMPERATURE:
        reason = (
            f"what is rounded is divided by the temperature, which must be at least "
            f"{_MIN_CENTRED_TEMPERATURE}: got {request.temperature}"
        )
    elif hidden.is_cuda and may_round_partial_sums(torch.bfloat16):
        reason = (
            "cuBLAS may round partial sums before it centres them: set "
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False at the start"
        )
    elif request.impl not in ("auto", "chunked", "cublas"):
        reason = f"impl={request.impl!r} is always exact"
    elif request.impl == "cublas" and not hidden.is_cuda:
        reason = "impl='cublas' needs CUDA tensors"
    elif request.deterministic == "batch_invariant":
        reason = "library products depend on the number of tokens"
    _require(reason, what, None)
    if not centred_products_are_right(hidden.device):
        warnings.warn(
            "precision='centred' failed its self-test on this machine: the library rounds before "
            "it adds the bias; float32 products are used",
            RuntimeWarning,
            stacklevel=4,
        )
        return _product_engine(request, is_centred=False)
    return _product_engine(request, is_centred=True)


def _batch_invariant_engine(request: Request, hidden: Tensor, weight: Tensor) -> LogprobEngine:
    what = "deterministic='batch_invariant'"
    reason = why_not_triton(hidden, weight)
    if request.impl not in ("auto", "triton"):
        reason = (
            f"impl={request.impl!r} uses library products, which depend on the number of tokens"
        )
    _require(reason, what, None)
    return _triton_engine(request, hidden, weight)


def _require(reason: str | None, what: str, instead: str | None) -> None:
    if reason is not None:
        advice = "" if instead is None else f"; pass impl={instead} or 'auto'"
        raise ValueError(f"{what} is not available here: {reason}{advice}")


def _chunked_engine(request: Request, hidden: Tensor, weight: Tensor) -> ChunkedEngine:
    is_narrow = hidden.dtype == weight.dtype == torch.bfloat16 and hidden.device.type == "cpu"
    return ChunkedEngine(request.chunk_columns, is_narrow and cpu_multiplies_bfloat16())


def _product_engine(
    request: Request, *, is_centred: bool, splits_weight: bool = False
) -> ProductEngine:
    uses_triton = has_triton() and torch.cuda.is_available()
    return ProductEngine(request.chunk_columns, is_centred, uses_triton, splits_weight)


def _is_aligned(*tensors: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes, which a bulk copy needs."""
    return all(
        tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
        for tensor in tensors
    )


def _bulk_gradient_engine(
    request: Request, fused: TritonEngine, hidden: Tensor, weight: Tensor
) -> TritonEngine | None:
    """The fused engine with bulk copies in its backward pass, where it works here."""
    if hidden.dtype not in _HALVES or not _is_aligned(hidden, weight):
        return None
    is_plain = not request.has_bias and not request.has_softcap and request.entropy != "grad"
    tiles = working_bulk_gradient_tiles(hidden.device, hidden.dtype, is_plain)
    return None if tiles is None else replace(fused, gradient_tiles=tiles)


def _triton_engine(request: Request, hidden: Tensor, weight: Tensor) -> TritonEngine:
    from lightrft.kernels.logprob import triton_launch

    is_half = hidden.dtype in _HALVES
    capability = torch.cuda.get_device_capability(hidden.device) if hidden.is_cuda else (8, 0)
    is_aligned = _is_aligned(hidden, weight)
    is_plain = not request.has_bias and not request.has_softcap
    bulk = None
    if is_half and is_aligned and capability >= (9, 0):
        bulk = working_bulk_tiles(hidden.device, hidden.dtype, is_plain)
    plain = triton_launch.plain_tiles(capability, is_half=is_half, is_aligned=is_aligned)
    gradient = triton_launch.gradient_tiles(
        capability,
        is_half=is_half,
        is_aligned=is_aligned,
        is_plain=is_plain and request.entropy != "grad",
    )
    return triton_launch.TritonEngine(request.chunk_columns, bulk or plain, gradient)

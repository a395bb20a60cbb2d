"""The change of logits around a model's output projection, measured on the code of the model.

Some models multiply hidden states or logits, cap logits, or cut off columns. The forward pass of
the model is called with a trunk that returns chosen hidden states and a projection that returns
chosen logits, so that no weight is read: they may be on no device yet. What arrives at the
projection, and what comes out at the end, says what the model does in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from lightrft.kernels.names import first_line
from lightrft.models.attention import trunk_of

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutputWithPast

NUM_TOKENS = 4
# Logits are powers of two: at the smallest ones no cap has an effect, the largest ones reach it.
EXPONENTS = range(-24, 41)
# Roundings by which a measured number may differ from the exact one.
ROUNDINGS = 64


class HeadRefusedError(ValueError):
    """A model has no head that can be trained."""


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """Change of logits: softcap * tanh(scale * logits / softcap), or scale * logits if uncapped.

    Args:
        scale: Factor on the logits.
        softcap: Bound on their magnitude, or None.
        num_columns: Number of leading columns that the model returns; None returns all.
        forbidden: Columns whose probability is 0.
    """

    scale: float = 1.0
    softcap: float | None = None
    num_columns: int | None = None
    forbidden: tuple[int, ...] = ()


def read_head_transform(model: PreTrainedModel) -> HeadTransform:
    """Return how a model changes hidden states and logits around its output projection.

    Args:
        model: Causal language model with a linear output projection.

    Raises:
        HeadRefusedError: It changes them by more than a factor, a cap and missing columns, or needs
            weights for it.
    """
    name = type(model).__name__
    projection = cast("nn.Linear", model.get_output_embeddings())
    hidden = _powers(projection.in_features, range(-3, 4))
    logits = _powers(projection.out_features, EXPONENTS)
    try:
        projected, output = _run(model, hidden, logits)
    except Exception as error:  # whatever a stranger's code does with numbers it does not expect
        raise HeadRefusedError(
            f"{name} computes more around its output projection than can be measured without its "
            f"weights ({first_line(error)}); such a head cannot be trained"
        ) from error
    factor = _factor(projected, hidden)
    if factor is None:
        raise HeadRefusedError(
            f"{name} changes hidden states before its output projection by more than a factor; "
            "such a head cannot be trained"
        )
    transform = _change(logits[: output.shape[-2]], output, name)
    is_scaled_before = factor != 1.0 or (transform.softcap is not None and transform.scale != 1.0)
    bias: Tensor | None = projection.bias
    if is_scaled_before and bias is not None:
        raise HeadRefusedError(
            f"{name} multiplies hidden states by {factor:.6g}, or logits before a cap by "
            f"{transform.scale:.6g}, around an output projection with a bias; such a head cannot "
            "be trained"
        )
    return HeadTransform(
        transform.scale * factor, transform.softcap, transform.num_columns, transform.forbidden
    )


def _powers(columns: int, exponents: range) -> Tensor:
    """Return [tokens, columns] float64 powers of two of either sign, on the CPU."""
    shape = (NUM_TOKENS, columns)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, shape, generator=generator, device="cpu") * 2 - 1
    places = torch.arange(NUM_TOKENS * columns, device="cpu").reshape(shape)
    return signs * 2.0 ** (exponents.start + places % len(exponents)).double()


@torch.no_grad()
def _run(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Call a model's forward pass with chosen hidden states and logits, [tokens, ...] each.

    Returns:
        What its projection was called with, and its logits [tokens, columns].
    """
    projected: list[Tensor] = []

    def trunk(*_: object, **__: object) -> BaseModelOutputWithPast:
        return _TrunkOutput(last_hidden_state=hidden[None])

    def project(values: Tensor) -> Tensor:
        projected.append(values)
        return logits[: values.shape[-2]].expand(*values.shape[:-1], -1).clone()

    with ExitStack() as stack:
        # The device that new tensors get may be that of a model without memory.
        stack.enter_context(torch.device("cpu"))
        for part in trunk_of(model).modules():
            if isinstance(part, PreTrainedModel):
                stack.enter_context(_computing(part, trunk))
        stack.enter_context(_computing(model.get_output_embeddings(), project))
        output: CausalLMOutputWithPast = model(input_ids=torch.zeros(1, NUM_TOKENS).long())
    return projected[-1], cast("Tensor", output.logits)[0]


class _TrunkOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """Output of a trunk in which everything is None but the hidden states."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


@contextmanager
def _computing(module: nn.Module, function: Callable[..., object]) -> Iterator[None]:
    """Replace the forward pass of a module in the body."""
    before = vars(module).get("forward")
    module.forward = function
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _factor(values: Tensor, chosen: Tensor) -> float | None:
    """Return the number that all values are multiplied by; None if there is none."""
    tokens = values.reshape(-1, values.shape[-1])
    wanted = chosen[-len(tokens) :]
    if tokens.shape != wanted.shape:
        return None
    ratios = tokens.double() / wanted
    factor = float(ratios[0, 0])
    tolerance = ROUNDINGS * torch.finfo(values.dtype).eps
    if not bool(((ratios - factor).abs() <= tolerance * abs(factor)).all()):
        return None
    return 1.0 if abs(factor - 1) <= tolerance else factor


def _change(logits: Tensor, output: Tensor, name: str) -> HeadTransform:
    """Return what turns chosen logits [tokens, vocab] into the model's [tokens, columns].

    Raises:
        HeadRefusedError: Something else than a `HeadTransform`.
    """
    eps, lowest = torch.finfo(output.dtype).eps, torch.finfo(output.dtype).min
    chosen, values = logits[:, : output.shape[-1]], output.double()
    is_never = (values <= lowest / 2).all(0)
    is_smallest = chosen.abs() == 2.0**EXPONENTS.start
    slopes = (values / chosen)[is_smallest & ~is_never]
    scale = float(slopes[0]) if len(slopes) else 1.0
    scale = 1.0 if abs(scale - 1) <= ROUNDINGS * eps else scale
    expected, softcap = scale * chosen, None
    largest = float(values[:, ~is_never].abs().max())
    if largest < abs(scale) * 2.0 ** (EXPONENTS.stop - 2):
        softcap = largest
        expected = softcap * torch.tanh(expected / softcap)
    error = ((values - expected).abs() / expected.abs())[:, ~is_never].max()
    if not error <= ROUNDINGS * eps:
        raise HeadRefusedError(
            f"{name} changes its logits by more than a factor and a cap: after the factor "
            f"{scale:.6g} they differ by {float(error):.2g} of themselves; such a head cannot be "
            "trained"
        )
    num_columns = output.shape[-1] if output.shape[-1] < logits.shape[-1] else None
    never = tuple(int(column) for column in is_never.nonzero().flatten())
    return HeadTransform(scale, softcap, num_columns, never)

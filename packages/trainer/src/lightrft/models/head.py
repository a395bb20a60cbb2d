"""Output layer of a policy: logprobs of chosen tokens, with the model's changes of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from lightrft.kernels import Workspace, linear_logprob, linear_policy_loss
from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer, leading
from lightrft.kernels.names import first_line
from lightrft.models.attention import trunk_of
from lightrft.models.types import EntropyMode, HeadReader, Projected

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from lightrft.models.support import SamplingSupport


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


EXACT_ROWS = 8192


class LinearLogprobHead(nn.Module):
    """Output projection with logprobs, under the names and parameters of the layer it replaces.

    The projection happens inside `forward`, so that the hooks of FSDP2 and ZeRO-3 gather the weight
    and receive its gradient from autograd.

    Args:
        projection: Layer to replace; its parameters are used, not copied.
        transform: Change that the model makes to the logits.
        is_fused: Work by chunks of the vocabulary instead of holding all logits.
        chunk_size: Columns of the vocabulary in one chunk, if fused; None takes a number that suits
            the device.
        forbidden_ids: Tokens that the policy never samples: their logits are -inf.

    Attributes:
        num_tokens: Number of leading rows that are tokens; the others are never sampled. None
            takes all.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        projection: nn.Linear,
        *,
        transform: HeadTransform,
        is_fused: bool,
        chunk_size: int | None,
        forbidden_ids: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.num_tokens = transform.num_columns
        self.forbidden_ids = tuple(sorted({*forbidden_ids, *transform.forbidden}))
        self._forbidden: dict[torch.device, Tensor] = {}
        self.in_features = projection.in_features
        self.out_features = projection.out_features
        self.weight = projection.weight
        self.register_parameter("bias", projection.bias)
        self.transform = transform
        self.fuse(chunk_size)
        self.is_fused = is_fused
        self._is_exact = False

    def limit_tokens(self, num_tokens: int | None) -> None:
        """Take only so many leading rows as tokens, or as many as the model's logits have."""
        limits = [n for n in (num_tokens, self.transform.num_columns) if n is not None]
        self.num_tokens = min(limits, default=None)

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Give the model's forward pass logits that are not rounded to its dtype."""
        self._is_exact = True
        try:
            yield
        finally:
            self._is_exact = False

    def fuse(self, chunk_size: int | None) -> None:
        """Compute logprobs together with the projection, in chunks of the vocabulary."""
        self.is_fused = True
        self.workspace = None if chunk_size is None else Workspace(chunk_size)

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = "none",
        support: SamplingSupport | None = None,
        token_loss: Callable[[Tensor, Tensor | None, Tensor], Tensor] | HeadReader | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the logprobs and entropy of targets; without targets the plain projection.

        The model's forward calls the plain projection, and applies scale and softcap itself. The
        result is a tuple: ZeRO-3 finds no tensors to hook inside other containers.

        Args:
            hidden: [tokens, hidden], or [..., hidden] without targets.
            targets: [tokens] int64.
            temperature: Divides the logits.
            entropy: "none", "value" (detached) or "grad".
            support: Truncation of the sampled targets, with their recorded ids; None replays none.
            token_loss: Function (logprobs, entropy or None, their indices) -> [] of some targets,
                with a graph. It is computed with its gradients, chunk by chunk; needs a fused head.
                With a `HeadReader` logprobs are 0.

        Returns:
            (logprobs [tokens] float32, entropy [tokens] float32 or None, log kept mass [tokens]
            float32 without graph or None, loss [] or None), or logits [..., vocab]. With a loss,
            only that has a graph.

        Raises:
            ValueError: There is a loss, but the head is not fused.
        """
        if targets is None:
            return self._projection(hidden)
        hidden, scaled = self._scaled(hidden, temperature)
        bias = self._sampling_bias(hidden)
        layer = self._sampled_layer(bias, scaled)
        if isinstance(token_loss, HeadReader):
            nothing = hidden.new_zeros(len(hidden), dtype=torch.float32)
            return nothing, None, None, token_loss.read(Projected(hidden, layer))
        kept = mass = loss = None
        if support is not None:
            kept, mass = self._supported(hidden, layer, targets, support)
            if kept is not None and support.suffices and entropy == "none":
                return kept, None, None, None
        if token_loss is not None:
            logprobs, entropies, loss = self._with_loss(
                hidden, targets, bias, scaled, entropy, token_loss
            )
        else:
            logprobs, entropies = self._over_vocabulary(hidden, targets, bias, scaled, entropy)
        if support is not None and kept is not None:
            logprobs, mass = support.joined(logprobs, kept, mass)
        return logprobs, entropies, mass, loss

    def _over_vocabulary(
        self,
        hidden: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        temperature: float,
        mode: EntropyMode,
    ) -> tuple[Tensor, Tensor | None]:
        output = linear_logprob(
            hidden,
            self.weight,
            targets,
            bias=bias,
            temperature=temperature,
            softcap=self.transform.softcap,
            entropy=mode,
            impl="auto" if self.is_fused else "reference",
            workspace=self.workspace if self.is_fused else None,
            num_tokens=self.num_tokens,
        )
        logprobs = output.logprobs if self.is_fused else output.logprobs.clone()  # FSDP2: no view
        return logprobs, output.entropy

    def _scaled(self, hidden: Tensor, temperature: float) -> tuple[Tensor, float]:
        """Return hidden states and the temperature with which plain logits become scaled ones."""
        scale = self.transform.scale
        if self.transform.softcap is None:
            return hidden, temperature / scale
        # Logits are scaled before they are capped, and divided by the temperature after it.
        return hidden if scale == 1 else hidden * scale, temperature

    def _projection(self, hidden: Tensor) -> Tensor:
        """Return the plain logits [..., vocab]."""
        if not self._is_exact:
            return F.linear(hidden, self.weight, self.bias)
        # In parts: a float32 copy of all weights would take memory.
        rows = hidden.float()
        logits = [F.linear(rows, part.float()) for part in torch.split(self.weight, EXACT_ROWS)]
        return torch.cat(logits, dim=-1) + (0.0 if self.bias is None else self.bias.float())

    def _sampled_layer(self, bias: Tensor | None, temperature: float) -> OutputLayer:
        """Return the output layer of the ids that are tokens."""
        transform = LogitsTransform(temperature, self.transform.softcap)
        return OutputLayer(
            self.weight[: self.num_tokens], leading(bias, self.num_tokens), transform
        )

    def _supported(
        self, hidden: Tensor, layer: OutputLayer, targets: Tensor, support: SamplingSupport
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return logprobs over recorded ids, and the computed `log_kept_mass`; None if unneeded."""
        # Only runs with truncated sampling import this.
        from lightrft.models.support import kept_logprobs, replay_support

        sets = support.kept
        kept = None if sets is None else kept_logprobs(hidden, layer, targets, sets)
        if not support.computes or (sets is not None and sets.is_complete):
            return kept, None
        size = (self.workspace or Workspace()).chunk_columns
        return kept, replay_support(hidden, layer, targets, support, chunk_size=size)

    def _sampling_bias(self, hidden: Tensor) -> Tensor | None:
        """Return the bias [vocab] of the sampling distribution; -inf where forbidden."""
        if not self.forbidden_ids:
            return self.bias
        bias = hidden.new_zeros(self.out_features) if self.bias is None else self.bias
        if hidden.device not in self._forbidden:
            # Moved once: a copy from host memory waits for the device's queue.
            self._forbidden[hidden.device] = torch.tensor(self.forbidden_ids, device=hidden.device)
        return bias.index_fill(0, self._forbidden[hidden.device], float("-inf"))

    def _with_loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        temperature: float,
        mode: EntropyMode,
        token_loss: Callable[[Tensor, Tensor | None, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if not self.is_fused:
            raise ValueError("a loss inside the output projection needs fused_linear_logprob")

        def differentiated(
            logprobs: Tensor, entropy: Tensor, rows: Tensor
        ) -> tuple[Tensor, Tensor, Tensor | None]:
            leaves = [logprobs.detach().requires_grad_()]
            if mode == "grad":
                leaves.append(entropy.detach().requires_grad_())
            entropies = None if mode == "none" else leaves[-1] if mode == "grad" else entropy
            loss = token_loss(leaves[0], entropies, rows)
            slopes = torch.autograd.grad(loss, leaves, materialize_grads=True)
            return loss, slopes[0], slopes[1] if mode == "grad" else None

        output = linear_policy_loss(
            hidden,
            self.weight,
            targets,
            differentiated,
            bias=bias,
            temperature=temperature,
            softcap=self.transform.softcap,
            ignore_index=None,
            entropy=mode,
            num_tokens=self.num_tokens,
        )
        return output.logprobs, output.entropy, output.loss

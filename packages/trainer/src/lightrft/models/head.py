"""Output layer of a policy: logprobs of chosen tokens, with the model's changes of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrft.kernels import Workspace, linear_logprob, linear_policy_loss
from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer, leading
from lightrft.models.divergence import HeadReader, Projected
from lightrft.models.head_transform import HeadTransform
from lightrft.models.types import EntropyMode

if TYPE_CHECKING:
    from lightrft.models.support import SamplingSupport


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

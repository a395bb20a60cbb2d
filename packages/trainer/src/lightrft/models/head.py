"""The output layer of a policy: gives logprobs of chosen tokens instead of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch.nn.functional as F
from torch import Tensor, nn

from lightrft.kernels import Workspace, linear_logprob
from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer
from lightrft.models.support import replay_support

if TYPE_CHECKING:
    from lightrft.models.head_transform import HeadTransform
    from lightrft.models.support import SamplingSupport
    from lightrft.models.types import EntropyMode


class LinearLogprobHead(nn.Module):
    """Takes the place of a model's output projection and keeps its parameters and their names.

    The projection happens inside `forward`, so that FSDP2 and ZeRO-3 gather the weight by their
    own hooks and receive its gradient from autograd.

    Args:
        projection: The layer it replaces; its parameters are taken over, not copied.
        transform: What the model does to the logits.
        is_fused: Work by chunks of the vocabulary instead of holding all logits.
        chunk_size: Columns of the vocabulary in one chunk, if fused.
    """

    bias: nn.Parameter | None

    def __init__(
        self, projection: nn.Linear, *, transform: HeadTransform, is_fused: bool, chunk_size: int
    ) -> None:
        super().__init__()
        self.in_features = projection.in_features
        self.out_features = projection.out_features
        self.weight = projection.weight
        self.register_parameter("bias", projection.bias)
        self.transform = transform
        self.is_fused = is_fused
        self._workspace = Workspace(chunk_size)

    def fuse(self, chunk_size: int) -> None:
        """Compute logprobs together with the projection, in chunks of the vocabulary."""
        self.is_fused = True
        self._workspace = Workspace(chunk_size)

    @overload
    def forward(self, hidden: Tensor) -> Tensor: ...
    @overload
    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = "none",
        support: SamplingSupport | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        temperature: float = 1.0,
        entropy: EntropyMode = "none",
        support: SamplingSupport | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None, Tensor | None]:
        """Logprobs and entropy of targets; without targets the plain projection.

        The plain projection is what the model's own forward calls: scale and softcap are left to
        it. A tuple, not a record: ZeRO-3 finds no tensors to hook inside other containers.

        Args:
            hidden: [tokens, hidden], or [..., hidden] without targets.
            targets: [tokens] int64.
            temperature: Divides the logits.
            entropy: "none", "value" (detached) or "grad".
            support: The truncation the targets were drawn with; None replays none.

        Returns:
            (logprobs [tokens] float32, entropy [tokens] float32 or None, log kept mass [tokens]
            float32 without graph or None), or logits [..., vocab].
        """
        if targets is None:
            return F.linear(hidden, self.weight, self.bias)
        scaled = temperature / self.transform.scale
        output = linear_logprob(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            temperature=scaled,
            softcap=self.transform.softcap,
            entropy=entropy,
            impl="auto" if self.is_fused else "reference",
            workspace=self._workspace if self.is_fused else None,
        )
        if support is None:
            return output.logprobs, output.entropy, None
        layer = OutputLayer(self.weight, self.bias, LogitsTransform(scaled, self.transform.softcap))
        mass = replay_support(
            hidden, layer, targets, support, chunk_size=self._workspace.chunk_columns
        )
        return output.logprobs, output.entropy, mass

    def extra_repr(self) -> str:
        """Sizes and mode, as `nn.Linear` shows them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, is_fused={self.is_fused}, transform={self.transform}"
        )

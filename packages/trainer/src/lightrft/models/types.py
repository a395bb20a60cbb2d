"""Outputs and call signatures of models, and the error of layouts that one refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.kernels.logprob.types import OutputLayer, apply_transform

if TYPE_CHECKING:
    from lightrft.models.support import SamplingSupport

EntropyMode = Literal["none", "value", "grad"]


# Without slots: the forward hooks of ZeRO-3 look for tensors by `vars(output)`.
@dataclass(frozen=True)
class ActorOutput:
    """Per-token outputs of a policy.

    Args:
        logprobs: [batch, seq] float32; entry t scores token t after the tokens before it.
            Entry 0 and entries outside the scored mask are 0.
        entropy: [batch, seq] float32 of the distribution token t was drawn from, or None.
        router_sums: [2, experts] float32 of a mixture-of-experts model, see
            `lightrft.models.actor.router_sums`; None unless requested.
        log_kept_mass: [batch, seq] float32 without graph: log-probability of the tokens that a
            truncated distribution could have drawn, 0 outside the scored mask; None if untruncated.
        loss: [] loss that was computed inside the output projection, over the scored tokens;
            logprobs and entropy have no graph then. None unless requested.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    router_sums: Tensor | None = None
    log_kept_mass: Tensor | None = None
    loss: Tensor | None = None

    @property
    def sampling_logprobs(self) -> Tensor:
        """[batch, seq] under the distribution the tokens were drawn from, truncation included."""
        if self.log_kept_mass is None:
            return self.logprobs
        return self.logprobs - self.log_kept_mass


@dataclass(frozen=True, slots=True)
class Replayed:
    """Facts that the engine recorded as it sampled tokens, to be replayed in a pass.

    Args:
        support: Truncation of the sampled tokens, to compute `log_kept_mass`, or logprobs over the
            recorded ids; None without.
        routes: [batch, seq, bytes] uint8, experts of all tokens but the last of each row; None lets
            the model choose.
    """

    support: SamplingSupport | None = None
    routes: Tensor | None = None


NOTHING_REPLAYED = Replayed()


@dataclass(frozen=True, slots=True)
class Projected:
    """Hidden states [tokens, hidden] and the layer that turns them into logits.

    Args:
        hidden: Hidden states of the scored tokens of this rank.
        layer: Output layer, whole on this rank.
        rows, columns: [tokens] places of the tokens in the batch; None inside the layer.
    """

    hidden: Tensor
    layer: OutputLayer
    rows: Tensor | None = None
    columns: Tensor | None = None

    def logits(self, rows: slice) -> Tensor:
        """Return [rows, vocab] logits in float32 or float64."""
        hidden, layer = self.hidden[rows], self.layer
        product = F.linear(hidden, layer.weight.to(hidden.dtype))
        wide = product if product.dtype == torch.float64 else product.float()
        return apply_transform(wide, layer.bias, layer.transform)

    def compared(self, own: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return logits of both models, without the ids that only the teacher has."""
        return own, self.logits(rows).detach()[:, : own.shape[1]]

    def at(self, index: Tensor) -> Projected:
        """Return some of the tokens."""
        rows, columns = (
            None if each is None else each[index] for each in (self.rows, self.columns)
        )
        return Projected(self.hidden[index], self.layer, rows, columns)


@dataclass(frozen=True, slots=True)
class HeadReader:
    """Loss [] that replaces an output projection and reads its inputs.

    Args:
        read: Function that is called while this rank has the whole weights of the layer.
    """

    read: Callable[[Projected], Tensor]


class LayoutRefusedError(ValueError):
    """A model does not support the requested layout; the message says why."""


# Loss of some scored tokens, with a graph: (logprobs [tokens], entropy [tokens] or None,
# rows [tokens], columns [tokens]) -> []; losses of disjoint sets of tokens must add up.
TokenLossFunction = Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]
# Signature of every actor, wrapped by a strategy or not; see
# `lightrft.models.actor.Actor.forward`.
PolicyModel = Callable[..., ActorOutput]
# Signature of every critic; see `lightrft.models.critic.Critic.forward`.
ValueModel = Callable[..., Tensor]

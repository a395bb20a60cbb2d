"""Outputs and call signatures of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

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


# Loss of some scored tokens, with a graph: (logprobs [tokens], entropy [tokens] or None,
# rows [tokens], columns [tokens]) -> []; losses of disjoint sets of tokens must add up.
TokenLossFunction = Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]
# Signature of every actor, wrapped by a strategy or not; see
# `lightrft.models.actor.Actor.forward`.
PolicyModel = Callable[..., ActorOutput]
# Signature of every critic; see `lightrft.models.critic.Critic.forward`.
ValueModel = Callable[..., Tensor]

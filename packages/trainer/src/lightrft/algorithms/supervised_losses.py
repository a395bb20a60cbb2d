"""Losses of supervised training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lightrft.algorithms.aggregation import weighted_share


@dataclass(frozen=True, slots=True)
class SupervisedLoss:
    """A loss per token, and the mean that it is taken in.

    Args:
        aggregation: Mode of `lightrft.algorithms.aggregation`.
        of_tokens: Loss of each token from its logprob, of any shape.
    """

    aggregation: str
    of_tokens: Callable[[Tensor], Tensor]

    def share(self, logprobs: Tensor, weights: Tensor, normalizer: Tensor) -> Tensor:
        """Return the share of some tokens in the loss of a step, [].

        Args:
            logprobs: Logprobs of any shape; 0 where nothing is trained.
            weights: Like it, see `loss_weights`.
            normalizer: Z of the step.
        """
        return weighted_share(self.of_tokens(logprobs.double()), weights, normalizer)


def negative_logprob(logprobs: Tensor) -> Tensor:
    """L = -log p."""
    return -logprobs


def dft(logprobs: Tensor) -> Tensor:
    """L = -p log p, no gradient through p: what the model finds unlikely is learned more slowly.

    Source: Wu et al. 2025, arXiv:2508.05629, eq. 9.
    """
    return -logprobs.detach().exp() * logprobs


LOSSES: Mapping[str, SupervisedLoss] = {
    "token-mean": SupervisedLoss("token-mean", negative_logprob),
    "seq-mean-token-mean": SupervisedLoss("seq-mean-token-mean", negative_logprob),
    "dft": SupervisedLoss("token-mean", dft),
}

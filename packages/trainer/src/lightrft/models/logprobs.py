"""Logprobs and entropy from logits that exist already."""

from __future__ import annotations

import torch
from torch import Tensor


def logprobs_from_logits(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log_softmax(logits / temperature) at the targets, computed in float32.

    Args:
        logits: [..., vocab], any floating dtype; logits[..., :] must predict targets[...].
        targets: [...] int64 token ids in [0, vocab).
        temperature: Positive.

    Returns:
        [...] float32.

    Raises:
        ValueError: The shapes do not agree or the temperature is not positive.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            "logits must be targets' shape plus the vocabulary: got logits "
            f"{tuple(logits.shape)} and targets {tuple(targets.shape)}; drop the last position of "
            "the logits and the first token before the call"
        )
    log_probabilities = _log_softmax(logits, temperature)
    return log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """-sum_v p_v log p_v of softmax(logits / temperature), in nats, computed in float32.

    Args:
        logits: [..., vocab], any floating dtype.
        temperature: Positive.

    Returns:
        [...] float32.
    """
    log_probabilities = _log_softmax(logits, temperature)
    # A token of probability 0 adds 0, where 0 * -inf would be NaN.
    finite = log_probabilities.masked_fill(log_probabilities.detach() == -torch.inf, 0.0)
    return -(log_probabilities.exp() * finite).sum(-1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive: got {temperature}; score T = 0 at T = 1")
    return torch.log_softmax(logits.to(torch.float32) / temperature, dim=-1)

"""What the load-balancing loss of a mixture of experts is computed from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def router_sums(
    router_logits: Sequence[Tensor] | None, attention_mask: Tensor, *, top_k: int
) -> Tensor:
    """How often each expert was chosen and how much probability it got, over all real tokens.

    Sums, not means: those of micro batches and ranks add up to those of their batch.

    Args:
        router_logits: Of each layer, [tokens, experts]; tokens are all positions of the mask, or
            only the real ones.
        attention_mask: [batch, seq] bool, True on real tokens.
        top_k: Experts that each token is sent to.

    Returns:
        [2, experts] float32: row 0 counts choices, without gradient, row 1 sums probabilities;
        over layers and real tokens.

    Raises:
        ValueError: There are no logits, or of another number of tokens.
    """
    if not router_logits:
        raise ValueError("the model returned no router logits: it has no experts to balance")
    num_real, num_all = int(attention_mask.sum()), attention_mask.numel()
    counts, sums = [], []
    for layer in router_logits:
        logits = layer.reshape(-1, layer.shape[-1]).float()
        if len(logits) == num_all:
            logits = logits[attention_mask.reshape(-1).bool()]
        elif len(logits) != num_real:
            raise ValueError(
                f"router logits must be of {num_all} positions or of {num_real} tokens: got "
                f"{len(logits)}"
            )
        probabilities = F.softmax(logits, dim=-1)
        chosen = probabilities.topk(top_k, dim=-1).indices.reshape(-1)
        counts.append(torch.bincount(chosen, minlength=logits.shape[-1]).float())
        sums.append(probabilities.sum(dim=0))
    return torch.stack([torch.stack(counts).sum(0), torch.stack(sums).sum(0)])

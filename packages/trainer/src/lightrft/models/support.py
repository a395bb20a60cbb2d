"""Tokens that a truncated distribution could have drawn, from the trainer's logits.

An engine that samples with top_k, top_p or min_p reports logprobs of the distribution renormalised
over the kept tokens. With the mass m of the kept tokens under the whole distribution,
log p_truncated = log p - log m for every kept token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.engines.sampling import keep_support
from lightrft.kernels.logprob.products import wide_product
from lightrft.kernels.logprob.types import OutputLayer, apply_transform

# 16 MiB of logits: sorting them takes about ten times as much.
BLOCK_LOGITS = 2**22


@dataclass(frozen=True, slots=True)
class SamplingSupport:
    """Truncation before a token is drawn: top_k, then top_p of what is left, then min_p.

    Args:
        top_k: Keep the k most likely tokens; -1 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: Keep tokens with at least this share of the top token's probability; 0 keeps all.
    """

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0


def log_kept_mass(logits: Tensor, targets: Tensor, support: SamplingSupport) -> Tensor:
    """Return the log-probability that a draw from the whole distribution is kept; at most 0.

    The target counts as kept: it was drawn, and rounding may put it on either side of the border.

    Args:
        logits: [rows, vocab] float32 or float64, temperature included.
        targets: [rows] int64, the drawn tokens.
        support: Truncation of the draw.

    Returns:
        [rows] in the dtype of the logits.
    """
    index = targets[:, None]
    kept = keep_support(logits, top_k=support.top_k, top_p=support.top_p, min_p=support.min_p)
    kept = kept.scatter(-1, index, logits.gather(-1, index))
    return (kept.logsumexp(dim=-1) - logits.logsumexp(dim=-1)).clamp_(max=0)


@torch.no_grad()
def replay_support(
    hidden: Tensor,
    layer: OutputLayer,
    targets: Tensor,
    support: SamplingSupport,
    *,
    chunk_size: int,
    block_logits: int = BLOCK_LOGITS,
) -> Tensor:
    """Return `log_kept_mass` of hidden states, a block of rows at a time; without graph.

    Args:
        hidden: [tokens, hidden].
        layer: Output layer and the distribution of its logits.
        targets: [tokens] int64, the drawn tokens.
        support: Truncation of the draw.
        chunk_size: Rows of the weight that are widened at a time.
        block_logits: Most logits of one block; a block has at least one row.

    Returns:
        [tokens] float32 (float64 for float64 inputs).
    """
    rows = max(1, block_logits // len(layer.weight))
    # One block even without tokens: its empty result then has the dtype of all others.
    starts = range(0, max(1, len(hidden)), rows)
    masses = [
        log_kept_mass(
            _logits(hidden[start : start + rows], layer, chunk_size),
            targets[start : start + rows],
            support,
        )
        for start in starts
    ]
    return torch.cat(masses)


def _logits(hidden: Tensor, layer: OutputLayer, chunk_size: int) -> Tensor:
    """Return [rows, vocab] float32 or float64 logits."""
    parts = []
    for start in range(0, len(layer.weight), chunk_size):
        part = slice(start, start + chunk_size)
        product = wide_product(hidden, layer.weight[part].T)
        bias = None if layer.bias is None else layer.bias[part].to(product.dtype)
        parts.append(apply_transform(product, bias, layer.transform))
    return torch.cat(parts, dim=-1)

"""From per-token losses to one number, independent of micro-batches and ranks.

The value over an optimizer batch is `sum_k S_k / Z`, k over micro-batches and ranks:

    S_k = sum over rows i of k, u_i * sum_t mask_it loss_it

    mode                       u_i     Z
    token-mean                 1       number of tokens
    seq-mean-token-sum         1       number of non-empty rows
    seq-mean-token-mean        1/L_i   number of non-empty rows
    seq-mean-token-sum-norm    1       number of non-empty rows * max_response_tokens

`local_normalizer` is one rank's addend of Z (sum it over micro-batches and ranks, once per
optimizer batch, before the first backward); `aggregate` is S_k / Z. A row without response tokens
adds 0 to both.

Where the branches of an episode are one sequence, row i is the share s_i of one, its share in the
sampled tokens of the episode: u_i is also multiplied by s_i where it is 1/L_i, and rows count s_i.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightrft.algorithms.interface import lookup
from lightrft.algorithms.masking import at_least_float32, mask_out, row_lengths


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Weights and count of one mode.

    Args:
        divides_by_length: A row's tokens weigh 1 / row length instead of 1.
        counts: What Z counts.
        has_constant: Z is also multiplied by the response budget of the run.
    """

    divides_by_length: bool
    counts: Literal["tokens", "rows"]
    has_constant: bool = False


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": Aggregation(divides_by_length=False, counts="tokens"),
    "seq-mean-token-sum": Aggregation(divides_by_length=False, counts="rows"),
    "seq-mean-token-mean": Aggregation(divides_by_length=True, counts="rows"),
    "seq-mean-token-sum-norm": Aggregation(
        divides_by_length=False, counts="rows", has_constant=True
    ),
}


def loss_weights(
    mask: Tensor,
    mode: str,
    *,
    dtype: torch.dtype = torch.float32,
    row_shares: Tensor | None = None,
) -> Tensor:
    """Weight u_i of every token before the division by Z: [batch, seq], 0 outside `mask`.

    Args:
        mask: [batch, seq] bool.
        mode: A name in `AGGREGATIONS`.
        dtype: Dtype of the weights; 1 / L_i is rounded to it.
        row_shares: [batch] share of each row in its sequence; None where each is a sequence.
    """
    aggregation = lookup(AGGREGATIONS, mode, kind="loss aggregation")
    weights = mask.to(dtype)
    if aggregation.divides_by_length:
        weights = weights / row_lengths(mask).clamp(min=1).unsqueeze(-1)
        if row_shares is not None:
            weights = weights * row_shares.to(dtype).unsqueeze(-1)
    return weights


def local_normalizer(
    mask: Tensor,
    mode: str,
    *,
    max_response_tokens: int | None = None,
    row_shares: Tensor | None = None,
) -> Tensor:
    """Addend of Z from these rows: scalar float64.

    Args:
        mask: [batch, seq] bool; the response mask, never a mask that keeps some of its tokens.
        mode: A name in `AGGREGATIONS`.
        max_response_tokens: The constant of seq-mean-token-sum-norm: the response budget of the
            run, not the width of this batch.
        row_shares: See `loss_weights`.

    Raises:
        ValueError: unknown mode, or seq-mean-token-sum-norm without a positive constant.
    """
    aggregation = lookup(AGGREGATIONS, mode, kind="loss aggregation")
    if aggregation.counts == "tokens":
        return mask.sum().double()
    is_filled = mask.any(dim=-1)
    num_rows = is_filled.sum().double()
    if row_shares is not None:
        num_rows = (is_filled * row_shares.double()).sum()
    if not aggregation.has_constant:
        return num_rows
    if max_response_tokens is None or max_response_tokens <= 0:
        raise ValueError(
            f"loss aggregation {mode!r} needs max_response_tokens > 0, the response budget of "
            f"the run: got {max_response_tokens}"
        )
    return num_rows * max_response_tokens


def aggregate(
    token_loss: Tensor,
    mask: Tensor,
    mode: str,
    normalizer: Tensor | float,
    *,
    row_shares: Tensor | None = None,
) -> Tensor:
    """Return the batch's share S_k / Z of the loss; scalar, with a graph even if it is 0.

    Args:
        token_loss: [batch, seq]; values outside `mask` are ignored, NaN included.
        mask: [batch, seq] bool.
        mode: A name in `AGGREGATIONS`.
        normalizer: Z of the whole optimizer batch; 0 (no token anywhere) gives 0.
        row_shares: See `loss_weights`.
    """
    loss = at_least_float32(token_loss)
    weights = loss_weights(mask, mode, dtype=loss.dtype, row_shares=row_shares)
    return weighted_share(mask_out(loss, mask), weights, normalizer)


def weighted_share(token_loss: Tensor, weights: Tensor, normalizer: Tensor | float) -> Tensor:
    """`aggregate` of some tokens whose weights u_i are known: their part of S_k / Z, scalar.

    Args:
        token_loss: Losses of any shape, finite.
        weights: Like it, from `loss_weights` of the rows that the tokens belong to.
        normalizer: Z of the whole optimizer batch; 0 (no token anywhere) gives 0.
    """
    loss = at_least_float32(token_loss)
    total = (loss * weights.to(loss.dtype)).sum()
    z = torch.as_tensor(normalizer, dtype=torch.float64, device=loss.device)
    scale = torch.where(z > 0, 1.0 / z.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return total * scale.to(loss.dtype)


def balance_share(router_sums: Tensor, batch_sums: Tensor) -> Tensor:
    """Return the share of some tokens in the load-balancing loss of their optimizer batch.

        L = E sum_e f_e P_e,   f_e = C_e / R,   P_e = S_e / R

    with C_e choices of and S_e probability for expert e, and R pairs of token and layer, all of
    the whole optimizer batch. f_e has no gradient. So the shares, with the batch's C and R and the
    S of their tokens, add up to L, and their gradients to its gradient, for every split.

    Source: Fedus et al. 2021, arXiv:2101.03961, eqs. 4 to 6, for more than one expert a token as
    in transformers: f sums to the number of experts of a token.

    Args:
        router_sums: [2, experts] C and S of these tokens; gradients flow through S.
        batch_sums: [2, experts] C and S of the whole batch over all ranks, without gradient.

    Returns:
        Scalar; 0 for a batch without tokens.
    """
    counts, sums = batch_sums[0].double(), batch_sums[1].double()
    # The probabilities of a token add up to 1.
    num_rows = sums.sum().clamp(min=1.0)
    share: Tensor = (counts * router_sums[1].double()).sum() * len(counts) / num_rows.square()
    return share.to(router_sums.dtype)

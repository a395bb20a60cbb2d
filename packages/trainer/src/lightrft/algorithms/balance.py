"""The load-balancing loss of mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def balance_share(router_sums: Tensor, batch_sums: Tensor) -> Tensor:
    """The share of some tokens in the load-balancing loss of their optimizer batch.

        L = E sum_e f_e P_e,   f_e = C_e / R,   P_e = S_e / R

    with C_e choices of and S_e probability for expert e, and R pairs of token and layer, all of
    the whole optimizer batch. f_e has no gradient, so the shares with the batch's C and R and the
    own S add up to L, and their gradients to its gradient, however the batch is cut.

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

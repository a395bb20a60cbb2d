"""Where each scored token lies in the model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Padded rows: the forward sees [batch, seq] as it is, the head only the scored positions.

    Token t is scored from the hidden state of token t - 1.

    Args:
        position_ids: [batch, seq] int64, counting attended tokens from 0.
        rows: [scored] row of each scored token, ascending.
        columns: [scored] its column, at least 1.
        targets: [scored] its token id.
    """

    position_ids: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor

    @classmethod
    def padded(
        cls, token_ids: Tensor, attention_mask: Tensor, scored_mask: Tensor | None = None
    ) -> TokenLayout:
        """The layout of padded rows.

        Args:
            token_ids: [batch, seq] int64.
            attention_mask: [batch, seq] bool, True on real tokens.
            scored_mask: [batch, seq] bool, True on tokens to score; None scores every token that
                has a token before it.

        Raises:
            ValueError: Shapes differ, or the mask marks padding or a token without predecessor.
        """
        for name, mask in (("attention_mask", attention_mask), ("scored_mask", scored_mask)):
            if mask is not None and (mask.shape != token_ids.shape or token_ids.dim() != 2):
                raise ValueError(
                    f"{name} and token_ids must both be [batch, seq]: got {tuple(mask.shape)} and "
                    f"{tuple(token_ids.shape)}"
                )
        is_real = attention_mask.bool()
        can_score = is_real.clone()
        can_score[:, :1] = False
        can_score[:, 1:] &= is_real[:, :-1]
        is_scored = can_score if scored_mask is None else scored_mask.bool()
        wrong = (is_scored & ~can_score).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            raise ValueError(
                "scored_mask must mark only tokens that follow another token and are no padding: "
                f"got {len(wrong)} others, the first at row {row}, position {column}"
            )
        rows, columns = is_scored.nonzero(as_tuple=True)
        position_ids = (is_real.long().cumsum(dim=1) - 1).clamp_(min=0)
        return cls(position_ids, rows, columns, token_ids[rows, columns])

    def select(self, hidden: Tensor) -> Tensor:
        """Hidden states the scored tokens are predicted from: [batch, seq, h] -> [scored, h]."""
        return hidden[self.rows, self.columns - 1]

    def scatter(self, values: Tensor) -> Tensor:
        """One value per scored token back into [batch, seq]; all other entries are 0."""
        # Not a view of a flat tensor: FSDP2 attaches hooks to what a module returns.
        empty = values.new_zeros(self.position_ids.shape)
        return empty.index_put((self.rows, self.columns), values)

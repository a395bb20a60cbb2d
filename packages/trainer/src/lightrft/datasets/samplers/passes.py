"""Orders that take each row once in a pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightrft.datasets.prompt_sampler import Drawn, GroupResult, RowChoice


class InOrder:
    """The order of the files, pass after pass.

    Rows that do not fill a draw at the end of a pass are left out of it.

    Args:
        rows: Rows to draw from.
    """

    def __init__(self, rows: RowChoice) -> None:
        self._rows = rows
        self._order: tuple[int, list[int]] | None = None
        self.state: dict[str, object] = {"episode": 0, "consumed": 0}

    def draw(self, n: int) -> list[Drawn]:
        """Return the next places of the pass, or the first of the next one."""
        episode, consumed = int(str(self.state["episode"])), int(str(self.state["consumed"]))
        if consumed + n > self._rows.num_rows:
            episode, consumed = episode + 1, 0
        if self._order is None or self._order[0] != episode:
            self._order = episode, self.order_of(episode)
        self.state = {"episode": episode, "consumed": consumed + n}
        share = 1 / self._rows.num_rows
        return [Drawn(place, share) for place in self._order[1][consumed : consumed + n]]

    def order_of(self, episode: int) -> list[int]:
        """Return the order of a pass."""
        return list(range(self._rows.num_rows))

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Do nothing: results do not change the order."""


class Shuffle(InOrder):
    """A new order in each pass, drawn from seed + pass as torch's DistributedSampler does."""

    def order_of(self, episode: int) -> list[int]:
        """Return the order of a pass."""
        generator = torch.Generator().manual_seed(self._rows.seed + episode)
        order: list[int] = torch.randperm(self._rows.num_rows, generator=generator).tolist()
        return order

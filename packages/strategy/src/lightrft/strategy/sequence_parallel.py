"""Sharing work items among the ranks of one sequence-parallel group."""

from __future__ import annotations

from typing import TypeVar

from lightrft.strategy.distributed import ALONE, Group, gather_objects, group_rank, group_size

T = TypeVar("T")


class SPDataProcessor:
    """Gives every rank of a group the union of their items, and takes its own back.

    The ranks of a sequence-parallel group work on one sequence together, so each must see every
    item of the group. With one rank both methods are the identity.

    Args:
        group: The sequence-parallel group.
    """

    def __init__(self, group: Group = ALONE) -> None:
        self.group = group
        self._counts: list[int] = []

    def preprocess(self, items: list[T]) -> list[T]:
        """The items of all ranks of the group, in rank order. Collective; counts may differ."""
        if group_size(self.group) == 1:
            return items
        gathered = gather_objects(items, self.group)
        self._counts = [len(part) for part in gathered]
        return [item for part in gathered for item in part]

    def postprocess(self, items: list[T]) -> list[T]:
        """This rank's share of a list as long as what `preprocess` returned.

        Raises:
            ValueError: The length differs from that list's.
        """
        if group_size(self.group) == 1:
            return items
        if len(items) != sum(self._counts):
            raise ValueError(
                f"postprocess needs the {sum(self._counts)} items that preprocess returned, "
                f"got {len(items)}"
            )
        rank = group_rank(self.group)
        start = sum(self._counts[:rank])
        return items[start : start + self._counts[rank]]

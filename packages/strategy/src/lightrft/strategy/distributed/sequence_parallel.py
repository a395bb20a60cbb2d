"""Sharing work items, and models, among the ranks of one sequence-parallel group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from lightrft.strategy.distributed.collectives import (
    ALONE,
    Group,
    gather_objects,
    group_rank,
    group_size,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@runtime_checkable
class SharesSequences(Protocol):
    """Models whose forward pass can be divided along the sequence."""

    @property
    def sequence_group(self) -> ProcessGroup | None:
        """The ranks that call the model with the same batch; None is this rank alone."""

    def share_sequences(self, group: ProcessGroup | None) -> None:
        """Let all ranks of the group call the model with the same batch from now on."""


def share_sequences(model: nn.Module, group: ProcessGroup | None, *, is_trained: bool) -> None:
    """Divide a model's sequences among the ranks of a group; None leaves the model as it is.

    Raises:
        ValueError: A model for training cannot be divided: the ranks of a group would each compute
            all of it, and their gradients would be counted as often.
    """
    if group is None:
        return
    if isinstance(model, SharesSequences):
        model.share_sequences(group)
    elif is_trained:
        raise ValueError(
            f"sp_size {group_size(group)} needs a model that divides its sequences "
            f"(lightrft.models.Actor or Critic): got {type(model).__name__}; wrap it, or set "
            "sp_size to 1"
        )


class SPDataProcessor:
    """Exchange of items in a group: each rank sees all of them, and takes its part back.

    The ranks of a sequence-parallel group work on one sequence together, so each must see every
    item of the group. With one rank both methods are the identity.

    Args:
        group: The sequence-parallel group.
    """

    def __init__(self, group: Group = ALONE) -> None:
        self.group = group
        self._counts: list[int] = []

    def preprocess(self, items: list[T]) -> list[T]:
        """Return the items of all ranks, in rank order. Collective; counts may differ."""
        if group_size(self.group) == 1:
            return items
        gathered = gather_objects(items, self.group)
        self._counts = [len(part) for part in gathered]
        return [item for part in gathered for item in part]

    def postprocess(self, items: list[T]) -> list[T]:
        """Return this rank's part of a list as long as the result of `preprocess`.

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

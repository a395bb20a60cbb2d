"""Items that are trained on, whatever they hold: rows, and groups of rows that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from torch.utils.data import Dataset

from lightrft.engines.media.encoder import TEXT_ENCODER, Encoder

if TYPE_CHECKING:
    from lightrft.datasets.supervised_rows import SupervisedRow


class RowGroup(Protocol):
    """One or more rows whose losses are computed together."""

    @property
    def rows(self) -> tuple[SupervisedRow, ...]:
        """All of them, in the order in which they are compared."""
        ...


Item = TypeVar("Item", bound=RowGroup)
_Item_co = TypeVar("_Item_co", bound=RowGroup, covariant=True)


class RowData(Dataset[int], Generic[_Item_co]):
    """Items in the order of their files; the dataset's own items are their places.

    Args:
        rows: All of one kind.
        summary: One line about what became of the data.
        encoder: Encodes their images and videos.
    """

    def __init__(
        self, rows: Sequence[_Item_co], summary: str, *, encoder: Encoder = TEXT_ENCODER
    ) -> None:
        self.rows, self.summary, self.encoder = tuple(rows), summary, encoder

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return index

    @property
    def is_paired(self) -> bool:
        """Whether the rows of an item are compared with each other."""
        return len(self.rows[0].rows) > 1

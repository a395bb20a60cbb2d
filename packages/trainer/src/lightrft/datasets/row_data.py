"""Items to train on: rows, and groups of rows that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightrft.datasets.row_media import ShownMedia
from lightrft.engines.media.text_encoder import TEXT_ENCODER, Encoder


class RowGroup(Protocol):
    """Rows, at least one, whose losses are computed together."""

    @property
    def rows(self) -> tuple[SupervisedRow, ...]:
        """All rows, in the order in which they are compared."""
        ...


Item = TypeVar("Item", bound=RowGroup)
_Item_co = TypeVar("_Item_co", bound=RowGroup, covariant=True)


class RowData(Dataset[int], Generic[_Item_co]):
    """Items in the order of their files; the data set yields their places.

    Args:
        rows: Items of one kind.
        summary: One line about the kept and dropped data.
        encoder: Encoder of their images and videos.
        weights: How often each item is drawn, see `weight_of`; () is equally often.
    """

    def __init__(
        self,
        rows: Sequence[_Item_co],
        summary: str,
        *,
        encoder: Encoder = TEXT_ENCODER,
        weights: Sequence[float] = (),
    ) -> None:
        self.rows, self.summary, self.encoder = tuple(rows), summary, encoder
        self.weights = tuple(weights)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return index

    @property
    def is_paired(self) -> bool:
        """Return whether the rows of an item are compared with each other."""
        return len(self.rows[0].rows) > 1


@dataclass(frozen=True, slots=True)
class SupervisedRow:
    """Row to train on.

    Args:
        token_ids: [tokens] int32.
        is_trained: [tokens] bool; never the first token, which nothing predicts.
        shown: Images and videos; None without.
        teacher: Name of its teacher; "" if there is only one, or none.
        remarks: Parts of its text that were read differently than written.
        prompt: Hash of the text before the first trained token; b"" for a row of ids.
    """

    token_ids: NDArray[np.int32]
    is_trained: NDArray[np.bool_]
    shown: ShownMedia | None = None
    teacher: str = ""
    remarks: tuple[str, ...] = ()
    prompt: bytes = b""

    @property
    def rows(self) -> tuple[SupervisedRow, ...]:
        """The row alone: its loss needs no other."""
        return (self,)

    @property
    def media_digests(self) -> tuple[bytes, ...]:
        """Hash of each of its images and videos."""
        media = () if self.shown is None else self.shown.media
        return tuple(medium.digest.encode() for medium in media)

    @property
    def key(self) -> tuple[bytes, ...]:
        """Key that distinguishes it from other rows: its tokens, images and videos."""
        return self.token_ids.tobytes(), *self.media_digests

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """[tokens] before the first trained one, which may hold the end of a text before it."""
        return self.token_ids[: int(self.is_trained.argmax())]

    @property
    def prompt_key(self) -> tuple[bytes, ...]:
        """Key of its prompt, whatever follows: text or ids, images and videos."""
        return self.prompt or self.prompt_ids.tobytes(), *self.media_digests

    @property
    def num_trained(self) -> int:
        """Number of tokens whose loss counts."""
        return int(self.is_trained.sum())


def dropped(too_long: Sequence[str]) -> str:
    """Return how many rows are over-long, and the places of the first; "" without any."""
    examples = ", ".join(too_long[:3])
    return f"dropped {len(too_long)} over-long (first: {examples})" if too_long else ""

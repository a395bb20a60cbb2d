"""One walk over the rows of a source: what a run makes of them, and faults that it would meet."""

import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightrft.config import PromptDataOptions
from lightrft.datasets.files import Row
from lightrft.datasets.messages import ReadRecord
from lightrft.datasets.prompts import build_prompts
from lightrft.datasets.types import DataError
from lightrft.engines.media.files import MediaError
from lightrft.engines.text import Tokenizer

T = TypeVar("T")
Made = TypeVar("Made")
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A prompt that can be trained on.

    Args:
        location: Place in the source.
        text: Rendered prompt.
        token_ids: Token ids of the prompt.
        label: Reference answer, or None.
        columns: All columns of the row.
        media_sizes: Width and height of each image, then of each video.
        media: Digests of all media.
    """

    location: str
    text: str
    token_ids: tuple[int, ...]
    label: str | None
    columns: Mapping[str, object]
    media_sizes: tuple[tuple[int, int], ...] = ()
    media: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowCheck(Generic[Made]):
    """Findings of one walk over rows.

    Args:
        every: Rows that can be trained on, over-long ones included, with what a run makes of them.
        refused: Rows that cannot be used, None for malformed ones, each with a line that says why.
        num_split: Number of rows that a run splits into several.
        record: Record of the columns and keys that nothing read.
        fits: Function that says whether a run takes what it made, or leaves it out as too long.
    """

    every: tuple[tuple[Row, Made], ...]
    refused: tuple[tuple[Row | None, str], ...]
    num_split: int
    record: ReadRecord
    fits: Callable[[Made], bool]

    @property
    def rows(self) -> list[tuple[Row, Made]]:
        """Rows that a run trains on, with what it makes of them."""
        return [(row, made) for row, made in self.every if self.fits(made)]

    @property
    def made(self) -> list[Made]:
        """Rows as a run trains on them."""
        return [made for _, made in self.rows]

    @property
    def too_long(self) -> list[str]:
        """Places of rows that a run leaves out as too long."""
        return [row.location for row, made in self.every if not self.fits(made)]

    @property
    def problems(self) -> list[str]:
        """One line for each row that cannot be used."""
        return [line for _, line in self.refused]


def walk(
    items: Sequence[Row | DataError],
    read: Callable[[Row], Iterable[Made]],
    fits: Callable[[Made], bool],
) -> RowCheck[Made]:
    """Read every row as a run would, and continue after problems.

    Args:
        items: Rows, and errors in place of malformed ones (`scan_rows`).
        read: Function that makes of a row what is trained on.
        fits: Function that says whether a run takes that, or leaves it out as too long.
    """
    every: list[tuple[Row, Made]] = []
    refused: list[tuple[Row | None, str]] = []
    record, num_split = ReadRecord(), 0
    for item in with_progress(items, "rows checked"):
        if isinstance(item, DataError):
            refused.append((None, str(item)))
            continue
        try:
            made = list(read(record.watch(item)))
        except (DataError, MediaError) as error:
            refused.append((item, str(error)))
        else:
            num_split += len(made) > 1
            every += [(item, each) for each in made]
    return RowCheck(tuple(every), tuple(refused), num_split, record, fits)


def check_prompts(
    items: Sequence[Row | DataError],
    tokenizer: Tokenizer,
    config: PromptDataOptions,
    *,
    has_model: bool = True,
) -> RowCheck[CheckedRow]:
    """Render and tokenise every row as a run would, and continue after problems.

    Args:
        items: Rows, and errors in place of malformed ones (`scan_rows`).
        tokenizer, config, has_model: Arguments of `build_prompts`.
    """

    def read(row: Row) -> list[CheckedRow]:
        (prompt,) = build_prompts([row], 0, tokenizer, config, has_model=has_model)
        media = prompt.media
        return [
            CheckedRow(
                row.location,
                prompt.text,
                prompt.token_ids,
                prompt.label,
                row.columns,
                tuple(x.size() for kind in (media.images, media.videos) for x in kind),
                tuple(medium.digest for medium in media),
            )
        ]

    return walk(items, read, lambda row: len(row.token_ids) <= config.prompt_max_len)


def repeated(
    rows: Iterable[tuple[Row, Made]], contents: Callable[[Made], Hashable]
) -> list[tuple[str, str]]:
    """Return the place of each row that repeats an earlier one, with the place of the first.

    Args:
        rows: Rows, with what a run makes of them.
        contents: Function that returns what two equal rows share.
    """
    first: dict[Hashable, str] = {}
    pairs = ((row.location, first.setdefault(contents(made), row.location)) for row, made in rows)
    return [(place, earlier) for place, earlier in pairs if earlier != place]


def with_progress(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items, and report the progress on standard error every few seconds."""
    said = time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() - said >= PROGRESS_SECONDS:
            said = time.monotonic()
            print(f"{number} of {len(items)} {what}", file=sys.stderr, flush=True)
        yield item

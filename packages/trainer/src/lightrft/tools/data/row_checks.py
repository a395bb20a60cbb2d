"""Checks of the rows of a source: lengths, duplicates and faults that would affect a run."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightrft.config import PromptDataOptions, PromptOptions
from lightrft.datasets.files import Row
from lightrft.datasets.messages import INPUT_KEYS
from lightrft.datasets.prompts import build_prompts
from lightrft.datasets.render import PromptTokenizer
from lightrft.datasets.types import DataError
from lightrft.engines.media.errors import MediaError

LABEL_KEYS = (
    "label",
    "answer",
    "solution",
    "ground_truth",
    "reference",
    "target",
    "final_answer",
    "output",
)


@dataclass(frozen=True, slots=True)
class KeyProposal:
    """Columns that look like the prompt and the reference answer, or None."""

    input_key: str | None
    label_key: str | None
    holds_messages: bool


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A row that can be trained on.

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
class DataCheck:
    """Findings, row by row.

    Args:
        rows: Rows that can be trained on, over-long ones included.
        problems: One line for each row that cannot be used.
        num_empty: Number of these rows with an empty prompt.
        too_long: Places of prompts with more tokens than allowed; a run drops and counts them.
        duplicates: Places of repeated prompts, each with the place of the first row.
    """

    rows: tuple[CheckedRow, ...]
    problems: tuple[str, ...]
    num_empty: int
    too_long: tuple[str, ...]
    duplicates: tuple[tuple[str, str], ...]

    @property
    def usable(self) -> tuple[CheckedRow, ...]:
        """Rows that a run trains on, without those that are too long."""
        left_out = set(self.too_long)
        return tuple(row for row in self.rows if row.location not in left_out)

    @property
    def num_without_label(self) -> int:
        """Number of rows without a reference answer."""
        return sum(row.label is None for row in self.rows)


def propose_keys(columns: Mapping[str, object]) -> KeyProposal:
    """Return the columns of a row that look like the prompt and the reference answer.

    Args:
        columns: Columns of one row.
    """
    prompts = [name for name in INPUT_KEYS if _is_prompt(columns.get(name))]
    labels = [name for name in LABEL_KEYS if name in columns and name not in prompts[:1]]
    chosen = prompts[0] if prompts else None
    holds_messages = chosen is not None and not isinstance(columns[chosen], str)
    return KeyProposal(chosen, labels[0] if labels else None, holds_messages)


def check_rows(
    items: Iterable[Row | DataError],
    tokenizer: PromptTokenizer,
    config: PromptDataOptions,
    *,
    has_model: bool = True,
) -> DataCheck:
    """Render and tokenise every row as a run would, and continue after problems.

    Args:
        items: Rows, and errors in place of malformed ones (`scan_rows`).
        tokenizer, config, has_model: Arguments of `build_prompts`.
    """
    rows: list[CheckedRow] = []
    problems: list[str] = []
    num_empty = 0
    for item in items:
        try:
            if isinstance(item, DataError):
                raise item
            (prompt,) = build_prompts([item], 0, tokenizer, config, has_model=has_model)
            media = prompt.media
            sizes = tuple(
                x.size() for items_of_kind in (media.images, media.videos) for x in items_of_kind
            )
            rows.append(
                CheckedRow(
                    item.location,
                    prompt.text,
                    prompt.token_ids,
                    prompt.label,
                    item.columns,
                    sizes,
                    tuple(medium.digest for medium in media),
                )
            )
        except (DataError, MediaError) as error:
            problems.append(str(error))
            num_empty += isinstance(item, Row) and _is_empty(item, config)
    duplicates = repeated((row.location, (row.text, *row.media)) for row in rows)
    too_long = tuple(row.location for row in rows if len(row.token_ids) > config.prompt_max_len)
    return DataCheck(tuple(rows), tuple(problems), num_empty, too_long, duplicates)


def repeated(rows: Iterable[tuple[str, Hashable]]) -> tuple[tuple[str, str], ...]:
    """Return the place of each row that repeats an earlier one, with the place of the first.

    Args:
        rows: Place and contents of each row.
    """
    first: dict[Hashable, str] = {}
    pairs = ((place, first.setdefault(contents, place)) for place, contents in rows)
    return tuple((place, earlier) for place, earlier in pairs if earlier != place)


def _is_empty(row: Row, config: PromptOptions) -> bool:
    content = row.columns.get(config.input_key, "missing")
    if isinstance(content, str):
        return not content.strip()
    return content is None or (isinstance(content, Sequence) and not content)


def _is_prompt(value: object) -> bool:
    if isinstance(value, str):
        return True
    is_list = isinstance(value, Sequence) and len(value) > 0
    return is_list and isinstance(value, Sequence) and isinstance(value[0], Mapping)

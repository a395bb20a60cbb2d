"""Checks of the rows of a source: lengths, duplicates and faults that a run would meet."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightrft.config import PromptDataOptions, PromptOptions
from lightrft.datasets.files import Row
from lightrft.datasets.messages import INPUT_KEYS
from lightrft.datasets.prompts import build_prompts
from lightrft.datasets.render import PromptTokenizer
from lightrft.datasets.types import DataError
from lightrft.engines.media.media import MediaError

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
    """Columns that look like the prompt and the reference answer; None where none does."""

    input_key: str | None
    label_key: str | None
    holds_messages: bool


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A row that can be trained on.

    Args:
        location: Its place in the source.
        text: The rendered prompt.
        token_ids: Of the prompt.
        label: The reference answer, if there is one.
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
        rows: Those that can be trained on, over-long ones included.
        problems: One line for each row that cannot.
        num_empty: How many of those have an empty prompt.
        too_long: Places of prompts with more tokens than allowed; a run drops and counts them.
        duplicates: Places of prompts that an earlier row has already, and of those rows.
    """

    rows: tuple[CheckedRow, ...]
    problems: tuple[str, ...]
    num_empty: int
    too_long: tuple[str, ...]
    duplicates: tuple[tuple[str, str], ...]

    @property
    def usable(self) -> tuple[CheckedRow, ...]:
        """Rows that a run trains on: those that are not too long."""
        left_out = set(self.too_long)
        return tuple(row for row in self.rows if row.location not in left_out)

    @property
    def num_without_label(self) -> int:
        """Rows without a reference answer."""
        return sum(row.label is None for row in self.rows)


def propose_keys(columns: Mapping[str, object]) -> KeyProposal:
    """The columns of a row that look like the prompt and the reference answer.

    Args:
        columns: Of one row.
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
    """Renders and tokenises every row as a run would, and goes on after what is wrong.

    Args:
        items: Rows, and errors in the place of malformed ones (`scan_rows`).
        tokenizer, config, has_model: See `build_prompts`.
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
            sizes = tuple(x.size() for own in (media.images, media.videos) for x in own)
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
    """Return the places of rows that an earlier row equals, and of those.

    Args:
        rows: Place and contents of each.
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

"""`lightrft data check --stage sft|distill`: a check of supervised rows before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

from lightrft.config import RowRunOptions, SplitOptions
from lightrft.datasets.files import Row
from lightrft.datasets.messages import ReadRecord
from lightrft.datasets.row_data import SupervisedRow
from lightrft.datasets.row_origin import check_tokens
from lightrft.datasets.supervised_rows import NOTHING_TRAINED, RowEncoder, kind_of, remark_of
from lightrft.datasets.types import DataError
from lightrft.stages.opening import rows_within_context
from lightrft.stages.rows.row_inputs import marked_text, read_vocabulary
from lightrft.stages.rows.row_stage import num_updates
from lightrft.stages.teachers import require_same_tokens
from lightrft.tools.data.data_command import (
    MAX_CHARACTERS,
    NUM_SAMPLES,
    Request,
    read_items,
    require_bounded,
    say,
    show_duplicates,
    show_layout,
    show_lengths,
    show_lines,
    show_too_long,
    verdict,
    with_progress,
)
from lightrft.tools.data.row_checks import repeated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class SupervisedCheck:
    """Findings, row by row.

    Args:
        rows: Place and tokens of each row that a run trains on.
        too_long: Places of rows with more tokens than allowed, which a run leaves out.
        problems: One line for each row that cannot be used.
        num_split: Number of conversations that became several rows.
    """

    rows: tuple[tuple[str, SupervisedRow], ...]
    too_long: tuple[str, ...]
    problems: tuple[str, ...]
    num_split: int


def check(request: Request) -> int:
    """Print the findings on the rows; return 4 if a row is bad.

    Raises:
        ConfigError: The options do not fit the model.
        DataError: The source cannot be read at all, or the options do not fit its rows.
        ModelLoadError: The tokenizer cannot be read.
    """
    reading = read_vocabulary(request.config)
    config = request.config.replaced(rows_within_context(request.config))
    tokenizer = reading.tokenizer
    for place in config.teacher_folders.values():
        require_same_tokens(config, place, tokenizer)
    items, first = read_source(request.source, config, tokenizer)
    kind = kind_of(first)

    def encoder_of_rows() -> RowEncoder:
        return RowEncoder(tokenizer, config, kind, reading.vocab_size, reading.reader)

    require_bounded(first, lambda: list(encoder_of_rows().rows(first)))
    reading.statements.say(say)
    encoder = encoder_of_rows()
    say(f"rows with {encoder.kind}, trained: {encoder.train_on}")
    result = check_rows(items, encoder, config.max_row_tokens)
    show_rows(result, tokenizer)
    if config.train_on_regex is not None:
        say(f"rows without a match (a run leaves them out): {encoder.num_unmatched}")
    show_numbers(result, config)
    return verdict(len(result.problems), result.rows, "rows can be trained on")


def check_rows(
    items: Sequence[Row | DataError], encoder: RowEncoder, max_row_tokens: int
) -> SupervisedCheck:
    """Encode every row as a run would, and continue after problems.

    Args:
        items: Rows, and errors in place of malformed ones (`scan_rows`).
        encoder: Encoder of the stage.
        max_row_tokens: Length of the longest row that a run takes.
    """
    read, problems = read_each(items, lambda item: list(encoder.rows(item)))
    every = [(item.location, row) for item, made in read for row in made]
    rows = tuple(each for each in every if len(each[1].token_ids) <= max_row_tokens)
    too_long = tuple(place for place, row in every if len(row.token_ids) > max_row_tokens)
    return SupervisedCheck(rows, too_long, problems, sum(len(made) > 1 for _, made in read))


def read_each(
    items: Sequence[Row | DataError], read: Callable[[Row], Made]
) -> tuple[list[tuple[Row, Made]], tuple[str, ...]]:
    """Return the result of each row, and a line for each row that cannot be read."""
    results: list[tuple[Row, Made]] = []
    problems: list[str] = []
    record = ReadRecord()
    for item in with_progress(items, "rows checked"):
        try:
            if isinstance(item, DataError):
                raise item
            results.append((item, read(record.watch(item))))
        except DataError as error:
            problems.append(str(error))
    say(record.line() or "all columns and keys of messages are read")
    return results, tuple(problems)


def read_source(
    source: str, config: SplitOptions, tokenizer: PreTrainedTokenizerBase
) -> tuple[Sequence[Row | DataError], Row]:
    """Print the layout of a source; return all rows and the first that can be read.

    Raises:
        DataError: No row can be read, or their token ids belong to another tokenizer.
    """
    items = read_items(source, config)
    rows = [item for item in items if not isinstance(item, DataError)]
    check_tokens(source, tokenizer)
    show_layout(source, rows, num_items=len(items))
    if not rows:
        raise DataError(f"{source}: no row of {len(items)} can be read: {items[0]}")
    return items, rows[0]


def show_rows(result: SupervisedCheck, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print the first rows as text, with their trained parts between >> and <<."""
    for place, row in result.rows[:NUM_SAMPLES]:
        show_text(place, row, tokenizer)
    say()


def show_text(place: str, row: SupervisedRow, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print a row as text, with its trained parts between >> and <<."""
    say(f"\n{place}: {len(row.token_ids)} tokens, {row.num_trained} trained (>>...<<)")
    text = marked_text(row, tokenizer)
    say("\n".join(f"    {line}" for line in text[:MAX_CHARACTERS].split("\n")))
    if len(text) > MAX_CHARACTERS:
        say(f"    and {len(text) - MAX_CHARACTERS} more characters")


def show_numbers(result: SupervisedCheck, config: RowRunOptions) -> None:
    """Print lengths, counts, the size of a run, and every row that cannot be used."""
    rows = [row for _, row in result.rows]
    show_sizes(rows)
    show_too_long(result.too_long, config.max_row_tokens, "max_row_tokens")
    keys = (
        (place, (row.token_ids.tobytes(), row.is_trained.tobytes(), *row.media_digests))
        for place, row in result.rows
    )
    show_duplicates("rows", repeated(keys))
    say(f"conversations in one row per turn: {result.num_split}")
    show_remarks(rows)
    num_empty = sum(NOTHING_TRAINED in problem for problem in result.problems)
    say(f"rows without a trained token: {num_empty}")
    show_run(rows, config)
    show_lines("rows that cannot be used", result.problems)


def show_sizes(rows: Sequence[SupervisedRow]) -> None:
    """Print how many tokens rows have, and how many of them are trained."""
    show_lengths("tokens of a row", [len(row.token_ids) for row in rows])
    show_lengths("trained tokens of a row", [row.num_trained for row in rows])


def show_remarks(rows: Iterable[SupervisedRow]) -> None:
    """Print how many texts were not read exactly as written."""
    say(f"texts read otherwise than they stand: {remark_of(rows) or 0}")


def show_run(rows: Sequence[SupervisedRow], config: RowRunOptions) -> None:
    """Print the steps of a run, and its tokens on average over the orders of its rows."""
    size = config.train_batch_size
    num_steps = num_updates(len(rows), config)
    if not num_steps:
        say(f"a run takes {size} rows a step, and has {len(rows)}: set --train_batch_size")
        return
    step = size * fmean(len(row.token_ids) for row in rows)
    trained = size * fmean(row.num_trained for row in rows)
    say(
        f"a run on 1 process: {num_steps} steps of {size} rows; on average {step:.0f} tokens a "
        f"step, {trained:.0f} of them trained; {num_steps * step:.0f} and "
        f"{num_steps * trained:.0f} in all"
    )

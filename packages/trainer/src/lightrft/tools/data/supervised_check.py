"""`lightrft data check --stage sft|distill`: what training on given tokens would find in rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from lightrft.cli.errors import ExitCode, UsageError, refuse
from lightrft.cli.options import Parser, available_options, parse_options
from lightrft.cli.preflight import model_problems, teacher_problems
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.commands import command_options
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
    check_parser,
    read_items,
    require_bounded,
    say,
    show_layout,
    show_places,
    stage_of,
    with_progress,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Made = TypeVar("Made")
DESCRIPTION = """\
Read every row as lightrft sft, distill, prefer or reward would, and say what is in them: the first
rows with their trained tokens marked, lengths, over-long and duplicate rows, of judged answers also
contradictions and what their lengths explain, and each row that cannot be used. Exit code 4 if a
row is bad.
"""
# Options that decide the size of a run, beside those of its rows.
SIZES = ("train_batch_size", "max_epochs")
QUANTILES = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


@dataclass(frozen=True, slots=True)
class SupervisedCheck:
    """Findings, row by row.

    Args:
        rows: Place and tokens of each row that a run trains on.
        too_long: Places of rows with more tokens than allowed, which a run leaves out.
        problems: One line for each row that cannot be used.
        num_split: Conversations that became several rows.
    """

    rows: tuple[tuple[str, SupervisedRow], ...]
    too_long: tuple[str, ...]
    problems: tuple[str, ...]
    num_split: int

    @property
    def duplicates(self) -> list[tuple[str, str]]:
        """Places of rows that an earlier row equals, and of those."""
        first: dict[tuple[bytes, ...], str] = {}
        found = []
        for place, row in self.rows:
            key = (row.token_ids.tobytes(), row.is_trained.tobytes(), *row.media_digests)
            if first.setdefault(key, place) != place:
                found.append((place, first[key]))
        return found


def run(argv: Sequence[str]) -> int:
    """Print what is in the rows; 4 if a row is bad.

    Raises:
        UsageError: No source.
        ConfigError: Options with wrong values.
        DataError: A source that cannot be read at all, or options that do not fit its rows.
        ModelLoadError: A tokenizer that cannot be read.
    """
    source, config = parse(argv, stage_of(argv))

    reading = read_vocabulary(config)
    config = rows_within_context(config)
    tokenizer = reading.tokenizer
    for place in config.teacher_folders.values():
        require_same_tokens(config, place, tokenizer)
    items, first = read_source(source, config, tokenizer)
    kind = kind_of(first)

    def encoder_of_rows() -> RowEncoder:
        return RowEncoder(tokenizer, config, kind, reading.vocab_size, reading.reader)

    require_bounded(first, lambda: list(encoder_of_rows().rows(first)))
    reading.statements.say(say)
    encoder = encoder_of_rows()
    say(f"rows with {encoder.kind}, trained: {encoder.train_on}")
    found = check_rows(items, encoder, config.max_row_tokens)
    show_rows(found, tokenizer)
    if config.train_on_regex is not None:
        say(f"rows without a match (a run leaves them out): {encoder.num_unmatched}")
    show_numbers(found, config)
    num_bad = len(found.problems)
    say(f"{num_bad} bad rows" if num_bad else f"{len(found.rows)} rows can be trained on")
    return ExitCode.DATA if num_bad or not found.rows else ExitCode.OK


def check_rows(
    items: Sequence[Row | DataError], encoder: RowEncoder, max_row_tokens: int
) -> SupervisedCheck:
    """Encodes every row as a run would, and goes on after what is wrong.

    Args:
        items: Rows, and errors in the place of malformed ones (`scan_rows`).
        encoder: That of the stage.
        max_row_tokens: Of the longest row that a run takes.
    """
    read, problems = read_each(items, lambda item: list(encoder.rows(item)))
    every = [(item.location, row) for item, made in read for row in made]
    rows = tuple(each for each in every if len(each[1].token_ids) <= max_row_tokens)
    too_long = tuple(place for place, row in every if len(row.token_ids) > max_row_tokens)
    return SupervisedCheck(rows, too_long, problems, sum(len(made) > 1 for _, made in read))


def read_each(
    items: Sequence[Row | DataError], read: Callable[[Row], Made]
) -> tuple[list[tuple[Row, Made]], tuple[str, ...]]:
    """What is made of each row, and a line for each of which nothing can be made."""
    found: list[tuple[Row, Made]] = []
    problems: list[str] = []
    record = ReadRecord()
    for item in with_progress(items, "rows checked"):
        try:
            if isinstance(item, DataError):
                raise item
            found.append((item, read(record.watch(item))))
        except DataError as error:
            problems.append(str(error))
    say(record.line() or "all columns and keys of messages are read")
    return found, tuple(problems)


def read_source(
    source: str, config: TrainConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Sequence[Row | DataError], Row]:
    """All rows of a source, of which the layout is shown, and the first that can be read.

    Raises:
        DataError: None can be read, or their token ids are of another tokenizer.
    """
    items = read_items(source, config)
    rows = [item for item in items if not isinstance(item, DataError)]
    check_tokens(source, tokenizer)
    show_layout(source, rows, num_items=len(items))
    if not rows:
        raise DataError(f"{source}: no row of {len(items)} can be read: {items[0]}")
    return items, rows[0]


def show_rows(found: SupervisedCheck, tokenizer: PreTrainedTokenizerBase) -> None:
    """The first rows as text, what is trained between >> and <<."""
    for place, row in found.rows[:NUM_SAMPLES]:
        show_text(place, row, tokenizer)
    say()


def show_text(place: str, row: SupervisedRow, tokenizer: PreTrainedTokenizerBase) -> None:
    """A row as text, what is trained between >> and <<."""
    say(f"\n{place}: {len(row.token_ids)} tokens, {row.num_trained} trained (>>...<<)")
    text = marked_text(row, tokenizer)
    say("\n".join(f"    {line}" for line in text[:MAX_CHARACTERS].split("\n")))
    if len(text) > MAX_CHARACTERS:
        say(f"    and {len(text) - MAX_CHARACTERS} more characters")


def show_numbers(found: SupervisedCheck, config: TrainConfig) -> None:
    """Lengths, counts, the size of a run, and every row that cannot be used."""
    lengths, trained = show_lengths([row for _, row in found.rows])
    show_places(
        f"over {config.max_row_tokens} tokens (a run leaves them out; --max_row_tokens)",
        found.too_long,
    )
    show_places(
        "duplicate rows (a run uses them all)",
        [f"{place} = {first}" for place, first in found.duplicates],
    )
    say(f"conversations in one row per turn: {found.num_split}")
    show_remarks(row for _, row in found.rows)
    num_empty = sum(NOTHING_TRAINED in problem for problem in found.problems)
    say(f"rows without a trained token: {num_empty}")
    show_run(lengths, trained, config)
    show_problems(found.problems)


def show_lengths(rows: Sequence[SupervisedRow]) -> tuple[np.ndarray, np.ndarray]:
    """[rows] tokens of each row, and how many of them are trained."""
    lengths = np.array([len(row.token_ids) for row in rows])
    trained = np.array([row.num_trained for row in rows])
    for what, counts in (("tokens of a row", lengths), ("trained tokens of a row", trained)):
        if len(counts):
            shown = (f"{name} {np.quantile(counts, q):g}" for name, q in QUANTILES.items())
            say(f"{what}: {', '.join(shown)}")
    return lengths, trained


def show_remarks(rows: Iterable[SupervisedRow]) -> None:
    """Print what of the texts was read otherwise than it stands."""
    say(f"texts read otherwise than they stand: {remark_of(rows) or 0}")


def show_problems(problems: Sequence[str]) -> None:
    """Every row that cannot be used."""
    say(f"rows that cannot be used: {len(problems)}")
    for problem in problems:
        say(f"  {problem}")


def show_run(lengths: np.ndarray, trained: np.ndarray, config: TrainConfig) -> None:
    """Steps of a run on rows of these lengths, and its tokens on average over their orders."""
    size = config.train_batch_size
    num_steps = num_updates(len(lengths), config)
    if not num_steps:
        say(f"a run takes {size} rows a step, and has {len(lengths)}: set --train_batch_size")
        return
    step, own = size * lengths.mean(), size * trained.mean()
    say(
        f"a run on 1 process: {num_steps} steps of {size} rows; on average {step:.0f} tokens a "
        f"step, {own:.0f} of them trained; {num_steps * step:.0f} and {num_steps * own:.0f} in all"
    )


def parse(argv: Sequence[str], stage: str) -> tuple[str, TrainConfig]:
    """The source and the options.

    Raises:
        ConfigError: Unknown names or wrong values, all at once.
        UsageError: No source.
    """
    config, parsed, problems = parse_options(build_parser(stage), argv)
    if config.pretrain is None:
        problems.append("--pretrain is missing: its tokenizer decides what is trained")
    else:
        problems += model_problems("--pretrain", config.pretrain)
    problems += teacher_problems(config)
    refuse(problems, ConfigError)
    source: str | None = parsed.source or config.prompt_data
    if source is None:
        raise UsageError("give a file, a folder or the name of a data set to check")
    return source, config


def build_parser(stage: str) -> Parser:
    """The parser of `lightrft data check` of a stage that trains on given rows."""
    policy, taken = available_options(), command_options("data")
    of_rows = [
        name
        for name in command_options("sft" if stage == "distill" else stage)
        if name in taken or name not in policy
    ]
    of_rules = ["label_key", *(name for name in taken if policy[name].group == "reward")]
    more = {"sft": SIZES, "distill": (*SIZES, "teacher"), "prefer": of_rules, "reward": of_rules}
    return check_parser(DESCRIPTION, (*of_rows, *more[stage]))

"""`lightrft data check --stage sft|distill|prefer|reward`: a check of such rows before a run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from lightrft.cli.errors import refuse
from lightrft.config import ConfigError, RowRunOptions, TrainConfig
from lightrft.datasets.files import Row
from lightrft.datasets.preference_rows import (
    SAME_ANSWERS,
    LabelledAnswer,
    PreferencePair,
    PreferenceReader,
)
from lightrft.datasets.ranked_rows import RankedAnswers
from lightrft.datasets.row_data import SupervisedRow
from lightrft.datasets.row_origin import check_tokens
from lightrft.datasets.scored_rows import ScoredAnswer
from lightrft.datasets.supervised_rows import NOTHING_TRAINED, RowEncoder, kind_of, remark_of
from lightrft.datasets.types import DataError
from lightrft.stages.preference.preference_inputs import data_problems
from lightrft.stages.reward.comparisons import Judgement
from lightrft.stages.reward.reward_inputs import judgement_reader, plan_scores
from lightrft.stages.reward.reward_objective import build_losses
from lightrft.stages.rows.row_inputs import marked_text, read_vocabulary
from lightrft.stages.start_checks import rows_within_context
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
    show_places,
    show_text,
    show_too_long,
    verdict,
)
from lightrft.tools.data.row_checks import RowCheck, repeated, walk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Made = SupervisedRow | Judgement
Reader = Callable[[Row], Iterable[Made]]
Pairs = Sequence[tuple[Row, PreferencePair]]
# If length alone is right this often, it may decide the pairs without their content.
SUSPICIOUS_SHARE = 0.75


def check(request: Request) -> int:
    """Print the findings on the rows; return 4 if a row is bad.

    Raises:
        ConfigError: The options do not fit the model or the rows.
        DataError: The source cannot be read at all, or the options do not fit its rows.
        ModelLoadError: The tokenizer cannot be read.
    """
    stage = request.stage
    reading = read_vocabulary(request.config, generates=stage != "reward")
    config = request.config.replaced(rows_within_context(request.config))
    tokenizer = reading.tokenizer
    for place in config.teacher_folders.values():
        require_same_tokens(config, place, tokenizer)
    items, first = read_source(request.source, config, tokenizer)
    encoders: list[RowEncoder] = []

    def open_reader() -> Reader:
        if stage in ("prefer", "reward"):
            build = PreferenceReader if stage == "prefer" else judgement_reader
            judge = build(tokenizer, config, first, reading.vocab_size, reading.reader)
            return lambda row: [judge(row)]
        kind = kind_of(first)
        encoder = RowEncoder(tokenizer, config, kind, reading.vocab_size, reading.reader)
        encoders.append(encoder)
        return encoder.rows

    require_bounded(first, lambda: list(open_reader()(first)))
    reading.statements.say(say)
    reader = open_reader()
    for encoder in encoders:
        say(f"rows with {encoder.kind}, trained: {encoder.train_on}")
    result = check_rows(items, reader, config.max_row_tokens)
    say(result.record.line() or "all columns and keys of messages are read")
    if not encoders:
        refuse(option_problems(result, config, stage), ConfigError)
    show_rows(result, tokenizer)
    for encoder in encoders if config.train_on_regex is not None else ():
        say(f"rows without a match (a run leaves them out): {encoder.num_unmatched}")
    show_numbers(result, config, is_judged=not encoders)
    return verdict(len(result.problems), result.rows, "rows can be trained on")


def check_rows(
    items: Sequence[Row | DataError], reader: Reader, max_row_tokens: int
) -> RowCheck[Made]:
    """Read every row as a run would, and continue after problems.

    Args:
        items: Rows, and errors in place of malformed ones (`scan_rows`).
        reader: Reader of the stage.
        max_row_tokens: Length of the longest row or answer, with its prompt, that a run takes.
    """

    def fits(made: Made) -> bool:
        return max(len(row.token_ids) for row in made.rows) <= max_row_tokens

    return walk(items, reader, fits)


def read_source(
    source: str, config: TrainConfig, tokenizer: PreTrainedTokenizerBase
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


def pairs_of(result: RowCheck[Made]) -> Pairs:
    """Return judgements that are pairs, with their rows."""
    return [(row, made) for row, made in result.rows if isinstance(made, PreferencePair)]


def contradictions(pairs: Pairs) -> list[str]:
    """Return pairs whose rejected answer is chosen in another pair of the prompt, with that one."""
    chosen = {each.chosen.key: row.location for row, each in pairs}
    keys = ((row, each.rejected.key) for row, each in pairs)
    return [f"{row.location} against {chosen[key]}" for row, key in keys if key in chosen]


def option_problems(result: RowCheck[Made], config: TrainConfig, stage: str) -> list[str]:
    """Return the reasons why the chosen loss or rule does not fit these rows, one line each."""
    made = result.made
    if not made:
        return []
    if stage == "prefer":
        preferences = [each for each in made if isinstance(each, PreferencePair | LabelledAnswer)]
        return data_problems(config, preferences, ())
    build_losses(config, plan_scores(config).weights, is_paired=len(made[0].rows) > 1)
    return []


def show_rows(result: RowCheck[Made], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print the first rows as text, with their trained parts between >> and <<."""
    for row, made in result.rows[:NUM_SAMPLES]:
        for name, answer in zip(_names(made), made.rows, strict=True):
            say(
                f"\n{row.location}{name and f', {name}'}: {len(answer.token_ids)} tokens, "
                f"{answer.num_trained} trained (>>...<<)"
            )
            text = marked_text(answer, tokenizer)
            show_text(text)
            if len(text) > MAX_CHARACTERS:
                say(f"    and {len(text) - MAX_CHARACTERS} more characters")
    say()


def _names(judgement: Made) -> list[str]:
    """Return the words for each answer of a judgement."""
    if isinstance(judgement, SupervisedRow):
        return [""]
    if isinstance(judgement, PreferencePair):
        margin = "" if judgement.margin is None else f", margin {judgement.margin:g}"
        return [f"chosen{margin}", "rejected"]
    if isinstance(judgement, RankedAnswers):
        named = judgement.by_name or {"": judgement.ranks}
        return [
            ", ".join(f"{name} rank {ranks[place]:g}".strip() for name, ranks in named.items())
            for place in range(len(judgement.rows))
        ]
    if isinstance(judgement, ScoredAnswer):
        return [f"score {judgement.score:g}"]
    if isinstance(judgement, LabelledAnswer):
        return ["good" if judgement.is_good else "bad"]
    return [f"steps {' '.join('right' if label else 'wrong' for label in judgement.labels)}"]


def show_numbers(result: RowCheck[Made], config: RowRunOptions, *, is_judged: bool) -> None:
    """Print lengths, counts, statistics of labels or of a run, and rows that cannot be used."""
    made = result.made
    rows = [row for each in made for row in each.rows]
    show_lengths("tokens of a row", [len(row.token_ids) for row in rows])
    show_lengths("trained tokens of a row", [row.num_trained for row in rows])
    show_too_long(result.too_long, config.max_row_tokens, "max_row_tokens")
    show_duplicates("rows", repeated(result.rows, _contents))
    faults = {"without a trained token": NOTHING_TRAINED}
    if is_judged:
        faults = {"whose answers are the same": SAME_ANSWERS, "without an answer": NOTHING_TRAINED}
    else:
        say(f"conversations in one row per turn: {result.num_split}")
    for what, text in faults.items():
        say(f"rows {what}: {sum(text in problem for problem in result.problems)}")
    pairs = pairs_of(result)
    if pairs:
        show_places("pairs whose rejected answer is chosen elsewhere", contradictions(pairs))
        show_bias([each for _, each in pairs])
    say(f"texts read otherwise than they stand: {remark_of(rows) or 0}")
    show_labels([each for each in made if not isinstance(each, SupervisedRow)])
    show_lines("rows that cannot be used", result.problems)


def _contents(made: Made) -> Hashable:
    """Return what equal rows share."""
    if isinstance(made, SupervisedRow):
        return made.key, made.is_trained.tobytes()
    return tuple(part for answer in made.rows for part in answer.key)


def show_labels(judgements: Sequence[Judgement]) -> None:
    """Print the range of labels and scores: of steps and answers, 1 is good or right."""
    labels: list[float] = []
    for each in judgements:
        if isinstance(each, ScoredAnswer):
            labels.append(each.score)
        elif not isinstance(each, PreferencePair | RankedAnswers):
            labels += map(float, each.labels)
    if labels:
        least, most = min(labels), max(labels)
        say(f"labels: {len(labels)}, from {least:g} to {most:g}, mean {fmean(labels):.4g}")
        if least == most:
            say("warning: all labels are equal: nothing can be learned from them")


def show_bias(pairs: Sequence[PreferencePair]) -> None:
    """Print in how many pairs the chosen answer is the longer one; equal lengths count half."""
    lengths = [[len(row.token_ids) for row in pair.rows] for pair in pairs]
    share = fmean((chosen > rejected) + (chosen == rejected) / 2 for chosen, rejected in lengths)
    say(f"the chosen answer is the longer one in {share:.1%} of the pairs, equal ones half")
    best = max(share, 1 - share)
    if best >= SUSPICIOUS_SHARE:
        say(
            f"warning: '{'longer' if share > 0.5 else 'shorter'} wins' is right in {best:.1%} "
            "of the pairs: what is learned from them may be length"
        )

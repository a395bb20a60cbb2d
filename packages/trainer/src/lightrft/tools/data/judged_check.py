"""`lightrft data check --stage prefer|reward`: a check of judged answers before a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lightrft.cli.errors import refuse
from lightrft.config import (
    ConfigError,
    PromptOptions,
    RowLengthOptions,
    ScoringOptions,
    TrainConfig,
)
from lightrft.datasets.files import Row
from lightrft.datasets.preference_rows import (
    SAME_ANSWERS,
    LabelledAnswer,
    PreferencePair,
    PreferenceReader,
)
from lightrft.datasets.ranked_rows import RankedAnswers
from lightrft.datasets.row_data import SupervisedRow
from lightrft.datasets.scored_rows import ScoredAnswer
from lightrft.datasets.supervised_rows import NOTHING_TRAINED
from lightrft.datasets.types import DataError
from lightrft.stages.opening import rows_within_context
from lightrft.stages.preference.preference_inputs import data_problems
from lightrft.stages.reward.comparisons import Comparisons, Judgement
from lightrft.stages.reward.reward_inputs import judgement_reader, plan_scores
from lightrft.stages.reward.reward_objective import build_losses
from lightrft.stages.rows.row_inputs import read_vocabulary
from lightrft.tools.data.certificate import MAX_ROWS, score_answers
from lightrft.tools.data.data_command import (
    NUM_SAMPLES,
    Request,
    require_bounded,
    say,
    show_duplicates,
    show_lines,
    show_places,
    show_too_long,
    verdict,
)
from lightrft.tools.data.row_checks import CheckedRow, repeated
from lightrft.tools.data.supervised_check import (
    read_each,
    read_source,
    show_remarks,
    show_sizes,
    show_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reader = Callable[[Row], Judgement]
# If length alone is right this often, it may decide the pairs without their content.
SUSPICIOUS_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class JudgedCheck:
    """Findings, row by row.

    Args:
        rows: Places, columns and judgements of the rows that a run trains on.
        too_long: Places of rows with an answer of more tokens than allowed, left out by a run.
        problems: One line for each row that cannot be used.
    """

    rows: tuple[tuple[Row, Judgement], ...]
    too_long: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def judgements(self) -> list[Judgement]:
        """Judgements without their places."""
        return [judgement for _, judgement in self.rows]

    @property
    def pairs(self) -> list[tuple[Row, PreferencePair]]:
        """Judgements that are pairs, with their rows."""
        return [(row, each) for row, each in self.rows if isinstance(each, PreferencePair)]

    @property
    def contradictions(self) -> list[str]:
        """Pairs whose rejected answer is chosen in another pair of the prompt, with that pair."""
        chosen = {each.chosen.key: row.location for row, each in self.pairs}
        keys = ((row, each.rejected.key) for row, each in self.pairs)
        return [f"{row.location} against {chosen[key]}" for row, key in keys if key in chosen]

    @property
    def beginnings(self) -> list[str]:
        """Places of pairs where one answer without its end token begins the other."""
        places = []
        for row, each in self.pairs:
            short, long = sorted((part.token_ids for part in each.rows), key=len)
            # The end token of the shorter answer is not at that place in the longer one.
            if np.array_equal(short[:-1], long[: len(short) - 1]) and len(short) < len(long):
                places.append(row.location)
        return places


def check(request: Request) -> int:
    """Print the findings on the rows; return 4 if a row is bad.

    Raises:
        ConfigError: The options do not fit the rows.
        DataError: The source cannot be read at all, or the options do not fit its rows.
        ModelLoadError: The tokenizer cannot be read.
        RewardError: A reward function cannot be loaded, or fails.
    """
    stage = request.stage
    reading = read_vocabulary(request.config, generates=stage == "prefer")
    config = request.config.replaced(rows_within_context(request.config))
    tokenizer = reading.tokenizer
    items, first = read_source(request.source, config, tokenizer)
    build = PreferenceReader if stage == "prefer" else judgement_reader
    reader: Reader = build(tokenizer, config, first, reading.vocab_size, reading.reader)
    require_bounded(first, lambda: reader(first))
    reading.statements.say(say)
    result = check_judgements(items, reader, config.max_row_tokens)
    refuse(option_problems(result, config, stage), ConfigError)
    show_judgements(result, tokenizer)
    show_numbers(result, config)
    if config.reward_fn:
        show_rule(result, tokenizer, config)
    return verdict(len(result.problems), result.rows, "rows can be trained on")


def check_judgements(
    items: Sequence[Row | DataError], reader: Reader, max_row_tokens: int
) -> JudgedCheck:
    """Read every row as a run would, and continue after problems.

    Args:
        items: Rows, and errors in place of malformed ones (`scan_rows`).
        reader: Reader of the stage.
        max_row_tokens: Length of the longest answer, with its prompt, that a run takes.
    """
    read, problems = read_each(items, reader)
    rows, too_long = [], []
    for item, made in read:
        if max(len(answer.token_ids) for answer in made.rows) > max_row_tokens:
            too_long.append(item.location)
        else:
            rows.append((item, made))
    return JudgedCheck(tuple(rows), tuple(too_long), problems)


def option_problems(result: JudgedCheck, config: TrainConfig, stage: str) -> list[str]:
    """Return the reasons why the chosen loss or rule does not fit these rows, one line each."""
    if not result.rows:
        return []
    problems = []
    if config.reward_fn and not result.pairs:
        problems.append("reward_fn compares the answers of pairs, and here are none: leave it out")
    if stage == "prefer":
        kinds = PreferencePair | LabelledAnswer
        preferences = [each for each in result.judgements if isinstance(each, kinds)]
        return problems + data_problems(config, preferences, ())
    is_paired = len(result.judgements[0].rows) > 1
    build_losses(config, plan_scores(config).weights, is_paired=is_paired)
    return problems


def show_judgements(result: JudgedCheck, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print the answers of the first rows, with their trained parts between >> and <<."""
    for row, each in result.rows[:NUM_SAMPLES]:
        for name, answer in zip(_names(each), each.rows, strict=True):
            show_text(f"{row.location}, {name}", answer, tokenizer)
    say()


def _names(judgement: Judgement) -> list[str]:
    """Return the words for each answer of a judgement."""
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


def show_numbers(result: JudgedCheck, config: RowLengthOptions) -> None:
    """Print lengths, counts, statistics of labels, and every row that cannot be used."""
    answers = [answer for each in result.judgements for answer in each.rows]
    show_sizes(answers)
    show_too_long(result.too_long, config.max_row_tokens, "max_row_tokens")
    keys = (
        (row.location, tuple(part for answer in each.rows for part in answer.key))
        for row, each in result.rows
    )
    show_duplicates("rows", repeated(keys))
    faults = {"whose answers are the same": SAME_ANSWERS, "without an answer": NOTHING_TRAINED}
    for what, text in faults.items():
        say(f"rows {what}: {sum(text in each for each in result.problems)}")
    if result.pairs:
        show_places("pairs whose rejected answer is chosen elsewhere", result.contradictions)
        show_places("pairs of which one answer begins the other", result.beginnings)
    show_remarks(answers)
    show_labels(result.judgements)
    show_bias(result.judgements)
    show_lines("rows that cannot be used", result.problems)


def show_labels(judgements: Sequence[Judgement]) -> None:
    """Print ties of rankings, and the range of labels and scores."""
    rankings = [each for each in judgements if isinstance(each, RankedAnswers)]
    if rankings:
        lists = [list(each.by_name.values()) or [each.ranks] for each in rankings]
        ties = sum(any(len(set(each)) < len(each) for each in every) for every in lists)
        alone = sum(all(len(set(each)) == 1 for each in every) for every in lists)
        say(f"rankings with ties: {ties} of {len(rankings)}, of ties alone: {alone}")
    labels = labels_of(judgements)
    if len(labels):
        say(
            f"labels: {len(labels)}, from {labels.min():g} to {labels.max():g}, mean "
            f"{labels.mean():.4g}"
        )
        if labels.min() == labels.max():
            say("warning: all labels are equal: nothing can be learned from them")


def labels_of(judgements: Sequence[Judgement]) -> np.ndarray:
    """Return [labels] float64 of answers without comparisons: 1 good or right, 0 bad or wrong."""
    labels: list[float] = []
    for each in judgements:
        if isinstance(each, ScoredAnswer):
            labels.append(each.score)
        elif not isinstance(each, PreferencePair | RankedAnswers):
            labels += map(float, each.labels)
    return np.array(labels, dtype=np.float64)


def length_bias(judgements: Sequence[Judgement]) -> float | None:
    """Return the share of pairs whose better answer has more tokens; equal lengths count half.

    All pairs of one ranking, also of one of several scores, together weigh as much as one pair.
    Ties are left out.
    """
    rankings = (each.by_name for each in judgements if isinstance(each, RankedAnswers))
    lengths = torch.tensor([float(len(row.token_ids)) for each in judgements for row in each.rows])
    longer = total = 0.0
    for name in set().union(*rankings) or {""}:
        comparisons = Comparisons.of(judgements, torch.device("cpu"), name)
        weights = comparisons.weights * ~comparisons.is_tie
        wins = (comparisons.differences(lengths.double()).sign() + 1) / 2
        longer += float((weights * wins).sum())
        total += float(weights.sum())
    return longer / total if total else None


def show_bias(judgements: Sequence[Judgement]) -> None:
    """Print how well the lengths of the answers explain the judgements."""
    share = length_bias(judgements)
    if share is not None:
        say(f"the better answer is the longer one in {share:.1%} of the pairs, ties half")
        best = max(share, 1 - share)
        if best >= SUSPICIOUS_SHARE:
            say(
                f"warning: '{'longer' if share > 0.5 else 'shorter'} wins' is right in {best:.1%} "
                "of the pairs: what is learned from them may be length"
            )
        return
    labels = labels_of(judgements)
    lengths = np.array([len(row.token_ids) for each in judgements for row in each.rows])
    if len(labels) == len(lengths) > 1 and labels.std() and lengths.std():
        say(f"correlation of labels with lengths: {np.corrcoef(labels, lengths)[0, 1]:.3f}")


def show_rule(
    result: JudgedCheck, tokenizer: PreTrainedTokenizerBase, config: ScoringOptions
) -> None:
    """Print the pairs whose rejected answer the reward function prefers."""
    pairs = result.pairs[:MAX_ROWS]
    rows = [
        _scored_row(row, answer, tokenizer, config) for row, each in pairs for answer in each.rows
    ]
    responses = [
        tokenizer.decode(answer.token_ids[answer.is_trained], skip_special_tokens=True)
        for _, each in pairs
        for answer in each.rows
    ]
    scores = score_answers(rows, responses, config)
    both = list(zip(pairs, scores[::2], scores[1::2], strict=True))
    decided = [(row, a, b) for (row, _), a, b in both if a is not None and b is not None]
    swapped = [row.location for row, better, worse in decided if better < worse]
    show_places(f"pairs of the first {len(pairs)} that the rule would swap", swapped)
    say(f"pairs that are equal to the rule: {sum(a == b for _, a, b in decided)}")
    say(f"pairs that it cannot decide: {len(both) - len(decided)}")


def _scored_row(
    row: Row, answer: SupervisedRow, tokenizer: PreTrainedTokenizerBase, config: PromptOptions
) -> CheckedRow:
    """Return the prompt of an answer with the label of its row."""
    start = int(np.argmax(answer.is_trained))
    prompt = tokenizer.decode(answer.token_ids[:start], skip_special_tokens=True)
    label = None if config.label_key is None else row.columns.get(config.label_key)
    text = label if isinstance(label, str) or label is None else json.dumps(label)
    return CheckedRow(row.location, prompt, (), text, row.columns)

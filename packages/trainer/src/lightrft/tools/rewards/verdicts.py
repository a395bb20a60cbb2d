"""Generative reward models: pairs of answers as questions in both orders, and their verdicts.

`both_orders:FILE` is a source of data. `lightrft sft` trains on its columns `prompt` and
`completion`; `lightrft train` and `lightrft eval` ask its `input` and score by its `label`.
"""

from collections.abc import Iterator, Mapping, Sequence

from lightrft.config import RewardOptions
from lightrft.datasets.files import read_rows
from lightrft.datasets.messages import CALLS, REASONING, Message, joined
from lightrft.datasets.preference_rows import SAME_ANSWERS, paired_chats
from lightrft.datasets.types import DataError
from lightrft.records.answer_order import PAIR_COLUMN, VERDICT
from lightrft.rewards.types import Columns, Labels, RewardResult, Texts
from lightrft.tools.rewards.judge_answers import verdict_letter
from lightrft.tools.rewards.judge_questions import STYLES, JudgedPrompt, fill_template
from lightrft.tools.rewards.labels import LabelReader

SOURCE_PREFIX = "both_orders:"
LETTERS = ("A", "B")


def ask(prompt: str, first: str, second: str) -> str:
    """Return the question which answer is better, as `--judge_compare verdicts` asks it."""
    return fill_template(STYLES["verdicts"], JudgedPrompt(prompt, None), (first, second))


def both_orders(text: str, split: str) -> Iterator[Mapping[str, object]]:
    """Yield two rows per pair of `both_orders:FILE`, first with the chosen answer as A, then as B.

    Args:
        text: Source; FILE is any other source of pairs of texts or messages.
        split: Split of FILE.

    Raises:
        DataError: A row is no such pair.
    """
    for row in read_rows(text.removeprefix(SOURCE_PREFIX), split=split):
        with row.placed():
            prompt, chosen, rejected = _texts(row.columns)
        for letter in LETTERS:
            ordered = (chosen, rejected) if letter == LETTERS[0] else (rejected, chosen)
            question = ask(prompt, *ordered)
            yield {
                "prompt": question,
                "completion": f"Verdict: {letter}",
                "input": question,
                "label": letter,
                PAIR_COLUMN: row.location,
            }


class VerdictReward(LabelReader[str]):
    """Reward of 1 if the verdict names the better answer, whose letter is the label; else 0.

    Components: `verdict` is 1 for the better answer, -1 for the other and 0 without a verdict;
    `readable` is 1 if there is a verdict; `names_first`, only with a verdict, is 1 if it is A.

    Args:
        config: Unused options.
        name: Name of the reward.
    """

    parallel_calls = 0
    whole_batch = False
    how_to_label = f"give the data as {SOURCE_PREFIX}FILE"

    def __init__(self, config: RewardOptions, name: str = "verdict") -> None:
        del config
        self.name = name

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult]:
        """Return the reward of each verdict."""
        del prompts, columns
        results = []
        for response, label in zip(responses, self.read_labels(labels), strict=True):
            letter = verdict_letter(response)
            named = 0.0 if letter is None else 1.0 if letter == label else -1.0
            components = {VERDICT: named, "readable": float(letter is not None)}
            if letter is not None:
                components["names_first"] = float(letter == LETTERS[0])
            results.append(RewardResult(float(named > 0), components))
        return results

    def read_label(self, label: str) -> str:
        """Return the letter of the better answer."""
        if label not in LETTERS:
            raise ValueError(
                f"expected the letter of the better answer, A or B, got {label!r}: "
                f"{self.how_to_label}"
            )
        return label

    def close(self) -> None:
        """Do nothing: the reward holds nothing."""


def _texts(columns: Mapping[str, object]) -> tuple[str, str, str]:
    """Return the prompt, chosen and rejected answer of a row.

    Raises:
        DataError: The row is no pair of texts or messages.
    """
    if not all(columns.get(name) for name in ("chosen", "rejected")):
        known = ", ".join(map(repr, columns)) or "none"
        raise DataError(f"expected columns prompt, chosen and rejected with texts; found {known}")
    talks, start = paired_chats(columns)
    chats = [talk.messages for talk in talks]
    chosen, rejected = (_text_of(chat[start:]) for chat in chats)
    if chosen == rejected:
        raise DataError(f"{SAME_ANSWERS}: leave the row out")
    return _text_of(chats[0][:start]), chosen, rejected


def _text_of(messages: Sequence[Message]) -> str:
    """Return the content of one message; with several, each behind its role.

    Raises:
        DataError: A message holds something other than text.
    """
    for key in (CALLS, REASONING):
        if any(key in message for message in messages):
            raise DataError(f"a message has {key}, which no question shows: leave the row out")
    contents = [joined(message["content"]) for message in messages]
    if len(contents) == 1:
        return contents[0]
    roles = (message["role"] for message in messages)
    return "\n\n".join(f"{role}: {text}" for role, text in zip(roles, contents, strict=True))

"""Prompts and whole texts of data files, tokenised and counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.data import Dataset

from lightrft.config import PromptDataOptions, PromptOptions, TrainConfig
from lightrft.datasets.files import Row, read_sources
from lightrft.datasets.media import (
    Modality,
    TextModality,
    VisionPrompts,
    media_columns,
)
from lightrft.datasets.messages import OF_PROMPTS, ReadRecord
from lightrft.datasets.prompt_sampler import weight_of
from lightrft.datasets.render import (
    check_tokenizer,
    label_of,
    teacher_prompt_ids,
    tokenise,
)
from lightrft.datasets.row_data import dropped
from lightrft.datasets.text_ids import prompt_remark
from lightrft.datasets.types import DataError, Prompt
from lightrft.engines.text import Tokenizer

if TYPE_CHECKING:
    from lightrft.datasets.pass_rates import PassRate

_TOKENIZER_BATCH = 1000


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Numbers of kept, cut and dropped rows of a data file.

    Args:
        path: File or folder.
        num_rows: Rows read before `max_samples` was reached.
        num_prompts: Prompts kept.
        too_long: Places of rows dropped because their prompt exceeds `prompt_max_len` tokens.
        num_without_label: Prompts kept that have no reference answer.
        max_prompt_tokens: Longest prompt kept, in tokens.
        remarks: Remarks on rows that sources left out, and on columns that are in no prompt.
    """

    path: str
    num_rows: int
    num_prompts: int
    too_long: tuple[str, ...]
    num_without_label: int
    max_prompt_tokens: int
    remarks: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return a line for a log, and one for each remark."""
        line = f"{self.path}: {self.num_prompts} prompts of at most {self.max_prompt_tokens} tokens"
        unlabelled = f"{self.num_without_label} without label" if self.num_without_label else ""
        line = "; ".join(filter(None, (line, dropped(self.too_long), unlabelled)))
        return "\n".join((line, *(f"{self.path}: {remark}" for remark in self.remarks)))


class PromptDataset(Dataset[Prompt]):
    """Prompts in the order of their file.

    Args:
        prompts: Prompts.
        report: Report on the rows.
        weights: How often each prompt is drawn, see `weight_of`; () is equally often.
        rates: Pass rate of each prompt; () is not known.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        report: LoadReport,
        weights: Sequence[float] = (),
        rates: Sequence[PassRate] = (),
    ) -> None:
        self.prompts, self.weights, self.rates = tuple(prompts), tuple(weights), tuple(rates)
        self.report = report

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


def collate_prompts(prompts: list[Prompt]) -> list[Prompt]:
    """Return the batch unchanged: prompts have different lengths and are padded much later."""
    return prompts


def load_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    config: PromptDataOptions | None = None,
    *,
    max_samples: int | None = None,
    split: str = "train",
    probabilities: Sequence[float] = (),
) -> PromptDataset:
    """Read, render and tokenise the prompts of one source or of several.

    Prompts longer than `prompt_max_len` are dropped and counted in the report.

    Args:
        path: JSONL, JSON or Parquet file, folder with one per split, or name of a data set; several
            of them separated by commas.
        tokenizer: Hugging Face tokenizer; it begins texts that no chat template writes.
        config: Options; `input_key`, `label_key`, `apply_chat_template`, `system_prompt`,
            `input_template`, `prompt_max_len`, `prompt_weight` and `seed` are read. None takes
            their defaults. The default `label` may be absent from the data; another name may not.
        max_samples: Keep at most this many prompts, from the start; None keeps all.
        split: Split of a folder or of a data set.
        probabilities: See `read_sources`.

    Raises:
        DataError: The file, a row or the combination of options is unusable, or no prompt is left.
    """
    config = config or TrainConfig()
    if max_samples is not None and max_samples < 1:
        raise DataError(f"max_samples must be at least 1: got {max_samples}")
    check_tokenizer(tokenizer, config)
    rows = read_sources(path, split=split, probabilities=probabilities, seed=config.seed)
    _check_label_key(rows, config)
    return _build(rows, tokenizer, config, str(path), max_samples)


def _build(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    config: PromptDataOptions,
    path: str,
    max_samples: int | None,
) -> PromptDataset:
    limit = len(rows) if max_samples is None else max_samples
    prompts, weights, locations = list[Prompt](), list[float](), list[str]()
    too_long: list[str] = []
    num_rows, record = 0, ReadRecord()
    while num_rows < len(rows) and len(prompts) < limit:
        # Rows after the last wanted one are not read: they may be unusable.
        batch = rows[num_rows : num_rows + min(_TOKENIZER_BATCH, limit - len(prompts))]
        batch = [record.watch(row) for row in batch]
        for row, prompt in zip(
            batch, build_prompts(batch, num_rows, tokenizer, config), strict=True
        ):
            if len(prompt.token_ids) > config.prompt_max_len:
                too_long.append(row.location)
            else:
                prompts.append(prompt)
                weights.append(weight_of(row, config))
                locations.append(row.location)
        num_rows += len(batch)
    if not prompts:
        raise DataError(
            f"{path}: all {num_rows} prompts exceed prompt_max_len = {config.prompt_max_len} "
            "tokens; raise --prompt_max_len, or lower --generate_max_len where the model's context "
            "has no room for both"
        )
    remarks = [*dict.fromkeys(row.remark for row in rows)]
    kept, rates, remark = _rated(prompts, locations, config)
    prompts, weights = [prompts[place] for place in kept], [weights[place] for place in kept]
    remarks.append(remark)
    if not config.apply_chat_template:
        remarks.append(prompt_remark(tokenizer, [each.text for each in prompts if not each.media]))
    report = LoadReport(
        path=path,
        num_rows=num_rows,
        num_prompts=len(prompts),
        too_long=tuple(too_long),
        num_without_label=sum(prompt.label is None for prompt in prompts),
        max_prompt_tokens=max(len(prompt.token_ids) for prompt in prompts),
        remarks=tuple(filter(None, (*remarks, record.line(OF_PROMPTS)))),
    )
    return PromptDataset(prompts, report=report, weights=weights, rates=rates)


def _rated(
    prompts: Sequence[Prompt], locations: Sequence[str], config: PromptDataOptions
) -> tuple[Sequence[int], Sequence[PassRate], str]:
    """Return `rated_prompts`; without `prompt_rates` all places."""
    if config.prompt_rates is None:
        return range(len(prompts)), (), ""
    from lightrft.datasets.pass_rates import rated_prompts

    return rated_prompts(config.prompt_rates, prompts, locations, config)


def build_prompts(
    rows: Sequence[Row],
    first_id: int,
    tokenizer: Tokenizer,
    config: PromptDataOptions,
    *,
    has_model: bool = True,
) -> list[Prompt]:
    """Return the prompts of some rows, tokenised together.

    Args:
        rows: Rows in the order of their ids.
        first_id: Id of the first row.
        tokenizer: Tokenizer of the model; `VisionPrompts` reads images and videos.
        config: See `load_prompts`.
        has_model: Whether the tokenizer is a model's; without one nothing reads the media.

    Raises:
        DataError: A row cannot be used.
    """
    columns = media_columns(config).values()
    media_names = {*chain.from_iterable(columns)}
    reader: Modality = TextModality(tokenizer, has_model=has_model)
    if isinstance(tokenizer, VisionPrompts):
        reader = tokenizer
    read = [reader.read(row, config) for row in rows]
    is_plain = [not reader.renders(each.media) for each in read]
    plain = [row for row, is_text in zip(rows, is_plain, strict=True) if is_text]
    contents = [each.content for each, is_text in zip(read, is_plain, strict=True) if is_text]
    tokenised = iter(tokenise(plain, tokenizer, config, contents) if plain else ())
    prompts = []
    for offset, (row, each) in enumerate(zip(rows, read, strict=True)):
        text, token_ids = next(tokenised) if is_plain[offset] else ("", ())
        others = {name: value for name, value in row.columns.items() if name not in media_names}
        prompt = Prompt(first_id + offset, text, token_ids, label_of(row, config), others)
        prompt = reader.prompt(row, replace(prompt, media=each.media), each.content)
        if not isinstance(each.content, str):
            prompt = replace(prompt, messages=tuple(each.content))
        prompt = replace(prompt, columns=_with_own_names(row, prompt, config))
        prompts.append(_for_episodes(prompt, row) if config.has_episodes else prompt)
    if config.teacher_prompt_column is None:
        return prompts
    shown = teacher_prompt_ids(rows, tokenizer, config)
    return [
        replace(prompt, teacher_token_ids=ids) for prompt, ids in zip(prompts, shown, strict=True)
    ]


def _with_own_names(row: Row, prompt: Prompt, config: PromptOptions) -> dict[str, object]:
    """Return the columns of a prompt with its messages and label in a form that JSON can hold.

    Kept rows and reward services are JSON, but messages may hold media, and labels dates. For
    rewards `conversations` are prompt and response, so a prompt column of that name is dropped.
    """
    columns = dict(prompt.columns)
    key, label_key = config.input_key, config.label_key
    if not isinstance(columns.get(key, ""), str):
        columns[key] = [dict(message) for message in prompt.messages]
    if key == "conversations":
        columns.pop(key, None)
    if label_key is not None and not isinstance(columns.get(label_key, ""), str):
        columns[label_key] = None if prompt.label is None else json.loads(prompt.label)
    return columns


def _for_episodes(prompt: Prompt, row: Row) -> Prompt:
    """Return the prompt with the columns that its environment needs.

    Raises:
        DataError: No message is the user's, or contents are not texts.
    """
    chat = prompt.messages
    has_user = any(message["role"] == "user" for message in chat)
    is_text = all(isinstance(message["content"], str) for message in chat)
    if not has_user or (not prompt.media and not is_text):
        raise DataError(
            f"{row.location}: an environment needs a user's message, and contents that are text "
            "where the row has no images"
        )
    return replace(prompt, row={**row.columns, "prompt": [dict(message) for message in chat]})


def _check_label_key(rows: Sequence[Row], config: PromptOptions) -> None:
    key = config.label_key
    if key in (None, "label") or any(key in row.columns for row in rows):
        return
    raise DataError(
        f"{rows[0].location}: no column {key!r} for the label, found "
        f"{', '.join(map(repr, rows[0].columns))}; set --label_key to one of them"
    )

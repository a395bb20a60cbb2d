"""Options of one part of a run: which rows are trained and evaluated on."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    EVAL,
    SFT,
    data_option,
)


@dataclass(kw_only=True)
class SourceOptions:
    """Which rows are trained and evaluated on."""

    prompt_data: str | None = data_option(
        None,
        "Training prompts (rows of lightrft sft, prefer, reward): a JSONL, JSON, Parquet or CSV "
        "file, a folder, or the name of a data set (owner/name[:configuration]); several separated "
        "by commas.",
        common=True,
        path="file",
        commands=SFT,
    )
    prompt_data_probs: tuple[float, ...] = data_option(
        (),
        "Shares of several sources of prompt_data; unset follows their sizes.",
        commands=SFT,
    )
    prompt_split: str = data_option(
        "train",
        "Part of a folder or data set to train on.",
        commands=("data", *SFT),
    )
    eval_data: str | None = data_option(
        None,
        "Evaluation prompts, in the same formats.",
        may_change=True,
        common=True,
        path="file",
        commands=(*EVAL, *SFT),
    )
    eval_split: str = data_option(
        "test",
        "Part of a folder or data set of eval_data.",
        may_change=True,
        commands=(*EVAL, *SFT),
    )
    max_samples: int = data_option(
        1_000_000,
        "Use at most this many training prompts.",
        at_least=1,
        commands=SFT,
    )
    max_eval_samples: int = data_option(
        500,
        "Use at most this many evaluation prompts.",
        at_least=1,
        acts_with="eval_data",
        may_change=True,
        commands=(*EVAL, *SFT),
    )

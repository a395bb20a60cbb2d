"""Whole texts of a data file, tokenised, for a language-modelling loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.datasets.errors import DataError
from lightrft.datasets.files import read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from lightrft.datasets.render import PromptTokenizer


def load_texts(
    path: str | Path,
    tokenizer: PromptTokenizer,
    *,
    text_key: str,
    max_tokens: int,
    end_token_id: int | None,
    max_samples: int | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Token ids of each text, its end marked and its tail cut off.

    Args:
        path: A JSONL, JSON or Parquet file, or a folder with a split "train".
        tokenizer: A Hugging Face tokenizer; special tokens are added as it does.
        text_key: Column of the texts.
        max_tokens: Longest text; what follows is cut off.
        end_token_id: Put after each text that is not cut; None puts nothing.
        max_samples: Use at most this many rows; None uses all.

    Raises:
        DataError: A row has no text, or a text has less than two tokens, so that none of them
            follows another.
    """
    texts: list[tuple[int, ...]] = []
    for row in read_rows(path)[:max_samples]:
        text = row.columns.get(text_key)
        if not isinstance(text, str):
            raise DataError(
                f"{row.location}: expected a text in column {text_key!r}, found "
                f"{', '.join(map(repr, row.columns))}; set --pretrain_column"
            )
        token_ids = [*tokenizer([text], add_special_tokens=True)["input_ids"][0]]
        if end_token_id is not None and token_ids[-1:] != [end_token_id]:
            token_ids.append(end_token_id)
        if len(token_ids) < 2:
            raise DataError(f"{row.location}: a text needs two tokens or more: got {text[:80]!r}")
        texts.append(tuple(token_ids[:max_tokens]))
    return tuple(texts)

"""Tokens that a regular expression chooses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightrft.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def matched_tokens(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], pattern: str
) -> NDArray[np.bool_]:
    """[tokens] whether a token holds a character of a match: of its first group, if it has one.

    Args:
        tokenizer: A fast one.
        token_ids: Of a row, whose text has the special tokens.
        pattern: A regular expression of Python.

    Raises:
        DataError: The text of the ids has other ids, or the tokenizer does not know their places.
    """
    if not tokenizer.is_fast:
        raise DataError(
            "train_on_regex needs a fast tokenizer, which knows the place of each token: got "
            f"{type(tokenizer).__name__}; leave it out"
        )
    text = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if encoded["input_ids"] != list(token_ids):
        raise DataError(
            "train_on_regex looks for matches in the text of a row, and the text of these tokens "
            f"has other tokens: {text[:80]!r}; leave it out"
        )
    starts, stops = np.array(encoded["offset_mapping"]).T
    found = np.zeros(len(token_ids), dtype=np.bool_)
    for match in re.finditer(pattern, text):
        first, last = match.span(1 if match.re.groups else 0)
        found |= (stops > first) & (starts < last)
    return found

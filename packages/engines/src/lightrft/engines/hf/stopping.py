"""When a completion ends: stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig


class TextDecoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int]) -> str:
        """The text of some tokens."""


def end_of_sequence_ids(
    config: PretrainedConfig, generation_config: GenerationConfig | None
) -> tuple[int, ...]:
    """Every end-of-sequence id that the model's config or generation config names."""
    sources = [config, config.get_text_config()]
    if generation_config is not None:
        sources.append(generation_config)
    ids: set[int] = set()
    for source in sources:
        # A vision-language model leaves it to its language model.
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return tuple(sorted(ids))


def stop_token_table(
    stop_ids: Sequence[int], vocab_size: int, *, device: torch.device
) -> torch.Tensor:
    """A lookup table of stop tokens: [vocab] bool. Ids beyond the vocabulary cannot be sampled."""
    table = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    known = [i for i in stop_ids if 0 <= i < vocab_size]
    if known:
        table[torch.tensor(known, device=device)] = True
    return table


class StopStringMatcher:
    """Finds stop strings in completions that grow token by token.

    Text is decoded incrementally: a character whose bytes are spread over several tokens counts
    once it is complete, and a string may straddle tokens.

    Args:
        stop_strings: Non-empty strings.
        decoder: Turns ids into text.
        num_rows: Number of completions.
    """

    def __init__(self, stop_strings: Sequence[str], decoder: TextDecoder, num_rows: int) -> None:
        if any(not text for text in stop_strings):
            raise ValueError(f"stop strings must not be empty: got {tuple(stop_strings)!r}")
        self._stop_strings = tuple(stop_strings)
        self._decoder = decoder
        self._tail_length = max(map(len, stop_strings)) - 1
        self._token_ids: list[list[int]] = [[] for _ in range(num_rows)]
        # Tokens before `prefix` are settled; those in [prefix, read) are decoded already and give
        # the context in which the next ones are decoded.
        self._prefix = [0] * num_rows
        self._read = [0] * num_rows
        self._tails = [""] * num_rows

    def push(self, row: int, token_id: int) -> bool:
        """Adds one token to a row; True if a stop string is now complete in its text."""
        token_ids = self._token_ids[row]
        token_ids.append(token_id)
        known = self._decoder.decode(token_ids[self._prefix[row] : self._read[row]])
        text = self._decoder.decode(token_ids[self._prefix[row] :])
        if len(text) <= len(known) or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return False
        self._prefix[row] = self._read[row]
        self._read[row] = len(token_ids)
        window = self._tails[row] + text[len(known) :]
        self._tails[row] = window[-self._tail_length :] if self._tail_length else ""
        return any(stop in window for stop in self._stop_strings)

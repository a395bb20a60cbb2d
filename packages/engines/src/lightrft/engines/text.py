"""Tokenizer of a checkpoint, ends of sequences and stop strings."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig


class TextDecoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int]) -> str:
        """The text of some tokens."""


class ChatTokenizer(Protocol):
    """The part of a tokenizer that renders conversations."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        tools: None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> object:
        """The text of a conversation."""


class Text:
    """Tokenizer that is loaded when stop strings or a prompt given as text first need it.

    Args:
        model_path: Directory of a Hugging Face checkpoint.
    """

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._loaded: object | None = None

    @property
    def _tokenizer(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
        if self._loaded is None:
            if not self._model_path or not Path(self._model_path).is_dir():
                raise FileNotFoundError(
                    "stop strings and prompts given as text need a tokenizer, and "
                    f"{self._model_path!r} is not a directory; set model_path to a checkpoint, or "
                    "use stop_token_ids and prompt_token_ids"
                )
            from transformers import AutoTokenizer

            self._loaded = AutoTokenizer.from_pretrained(
                self._model_path, local_files_only=True, trust_remote_code=False
            )
        return self._loaded

    def load(self) -> None:
        """Loads the tokenizer now, so that a missing one is reported before any work."""
        _ = self._tokenizer

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones included, with spaces as they are."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """The token ids of a text that already holds its special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def end_of_sequence_ids(
    config: PretrainedConfig, generation_config: GenerationConfig | None
) -> tuple[int, ...]:
    """Every end-of-sequence id that the model's config or generation config names."""
    # A vision-language model leaves it to its language model.
    sources = [config, config.get_text_config(), generation_config]
    return tuple(sorted(set().union(*map(declared_ends, sources))))


def declared_ends(source: PretrainedConfig | GenerationConfig | None) -> set[int]:
    """Return the end-of-sequence ids that one configuration names."""
    value = getattr(source, "eos_token_id", None)
    values = value if isinstance(value, list | tuple) else [value]
    return {each for each in values if isinstance(each, int) and each >= 0}


def text_behind_answer(tokenizer: ChatTokenizer) -> str | None:
    """Return what a chat template writes behind an answer; None where it drops the answer."""
    mark = f"Q{secrets.token_hex(8)}Z"
    talk: list[dict[str, object]] = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": mark},
    ]
    text = tokenizer.apply_chat_template(
        talk, tools=None, tokenize=False, add_generation_prompt=False
    )
    _, is_shown, rest = str(text).rpartition(mark)
    return rest if is_shown else None


def context_tokens(config: PretrainedConfig) -> int | None:
    """Positions of a model, under whatever name; None of one that has no bound (state space).

    With "longrope" those of the first of its two sets of frequencies: a longer row would rotate the
    rows beside it, and an answer that grows beyond them its own beginning, by the other one.
    """
    text = config.get_text_config()
    positions: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Engines keep room for one token more.
        positions = min(rope["original_max_position_embeddings"] - 1, positions or sys.maxsize)
    return positions if positions and positions > 0 else None


class StopStringMatcher:
    """Search for stop strings in completions that grow token by token.

    Text is decoded incrementally: a character whose bytes are spread over several tokens counts
    once it is complete, and a string may straddle tokens.

    Args:
        stop_strings: Non-empty strings.
        decoder: Turns ids into text.
        num_rows: Number of completions.
    """

    def __init__(self, stop_strings: Sequence[str], decoder: TextDecoder, num_rows: int) -> None:
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

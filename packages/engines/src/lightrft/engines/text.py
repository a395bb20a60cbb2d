"""Tokenizer of a checkpoint, end-of-sequence ids and stop strings."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig


class TextDecoder(Protocol):
    """Part of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of some tokens."""


class Tokenizer(Protocol):
    """Interface of a Hugging Face tokenizer that its stand-ins have, too.

    Stand-ins are a processor, a tokenizer that shows tools, and one for checks without a model.
    """

    @property
    def chat_template(self) -> str | None:
        """Template, or several by name."""
        ...

    def __call__(
        self, text: list[str], *, add_special_tokens: bool
    ) -> Mapping[str, list[list[int]]]:
        """Return token ids under the key `input_ids`."""
        ...

    # No signature: transformers' allows only texts as contents, but templates take parts of media.
    @property
    def apply_chat_template(self) -> Callable[..., object]:
        """`(conversation, *, tools, tokenize, add_generation_prompt)`; text for tokenize=False."""
        ...


class Text:
    """Tokenizer that is loaded when stop strings or a text prompt first need it.

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
        """Load the tokenizer now, to report a missing one before any work."""
        _ = self._tokenizer

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, including special ones, with spaces unchanged."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text that already holds its special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def end_of_sequence_ids(
    config: PretrainedConfig, generation_config: GenerationConfig | None
) -> tuple[int, ...]:
    """Return all end-of-sequence ids in the model's config or generation config."""
    # A vision-language model leaves them to its language model.
    sources = [config, config.get_text_config(), generation_config]
    return tuple(sorted(set().union(*map(declared_ends, sources))))


def declared_ends(source: PretrainedConfig | GenerationConfig | None) -> set[int]:
    """Return the end-of-sequence ids in one configuration."""
    value = getattr(source, "eos_token_id", None)
    values = value if isinstance(value, list | tuple) else [value]
    return {each for each in values if isinstance(each, int) and each >= 0}


def text_behind_answer(tokenizer: Tokenizer, eos_token: str | None) -> str | None:
    """Return what a chat template writes behind an answer, from the end of the turn on.

    That is the model's end of sequence if a message that follows the answer leaves it there: marks
    before it (like Cohere's end of a text) are part of the turn.

    Args:
        tokenizer: Tokenizer or processor with the template.
        eos_token: End of sequence of the model.

    Returns:
        None if the template drops the answer.
    """
    mark = f"Q{secrets.token_hex(8)}Z"
    question: dict[str, object] = {"role": "user", "content": "question"}
    answer: dict[str, object] = {"role": "assistant", "content": mark}

    def behind(messages: list[dict[str, object]]) -> str | None:
        text = tokenizer.apply_chat_template(
            messages, tools=None, tokenize=False, add_generation_prompt=False
        )
        _, is_shown, rest = str(text).rpartition(mark)
        return rest if is_shown else None

    last = behind([question, answer])
    if last and eos_token and not last.lstrip().startswith(eos_token):
        with suppress(Exception):  # some templates refuse what follows; it is said where it matters
            texts = [last, behind([question, answer, question]) or ""]
            both = os.path.commonprefix(texts)  # noqa: RUF071 - by characters
            last = last[max(0, both.find(eos_token)) :]
    return last


def context_tokens(config: PretrainedConfig) -> int | None:
    """Return the number of positions of a model; None if it has no bound (state space).

    With "longrope", return the bound of the first of its two sets of frequencies. A longer row
    would rotate the other rows of its batch by the second set, and a growing answer its beginning.
    """
    text = config.get_text_config()
    positions: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Engines reserve room for one more token.
        positions = min(rope["original_max_position_embeddings"] - 1, positions or sys.maxsize)
    return positions if positions and positions > 0 else None


class StopStringMatcher:
    """Matcher of stop strings in one completion that grows token by token.

    Text is decoded incrementally: a character whose bytes span several tokens counts once it is
    complete, and a string may span tokens.

    Args:
        stop_strings: Non-empty strings.
        decoder: Decoder of ids to text.
    """

    def __init__(self, stop_strings: Sequence[str], decoder: TextDecoder) -> None:
        self._stop_strings = tuple(stop_strings)
        self._decoder = decoder
        self._tail_length = max(map(len, stop_strings)) - 1
        self._token_ids: list[int] = []
        # Tokens before `prefix` are settled; those in [prefix, read) are already decoded and are
        # the context for decoding the next ones.
        self._prefix = self._read = 0
        self._tail = ""

    def push(self, token_id: int) -> bool:
        """Add one token; return whether the text now contains a complete stop string."""
        self._token_ids.append(token_id)
        known = self._decoder.decode(self._token_ids[self._prefix : self._read])
        text = self._decoder.decode(self._token_ids[self._prefix :])
        if len(text) <= len(known) or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return False
        self._prefix, self._read = self._read, len(self._token_ids)
        window = self._tail + text[len(known) :]
        self._tail = window[-self._tail_length :] if self._tail_length else ""
        return any(stop in window for stop in self._stop_strings)

"""What is appended after a turn: its answers, cut to what fits, framed by the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from lightrft.config import TrainConfig
from lightrft.datasets.suffix import Observation, TurnSuffix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of an observation that would not fit: less is not worth a turn.
MIN_OBSERVATION_TOKENS = 8
CUT = "[cut]"


class Observations:
    """Answers as token ids.

    Args:
        config: Its options `max_observation_tokens` and those that bound an episode.
        tokenizer: Of the model.
        suffix: Renders answers.
    """

    def __init__(
        self, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, suffix: TurnSuffix
    ) -> None:
        self._config, self._tokenizer, self._suffix = config, tokenizer, suffix

    def turn_tokens(self, context_length: int, max_tokens: int) -> int:
        """Most tokens of a turn of at most `max_tokens` after so many."""
        return max(1, min(max_tokens, self._config.max_episode_tokens - context_length))

    def has_room(self, turn: Sequence[int], context_length: int, count: int) -> bool:
        """Whether so many answers would be seen."""
        return self._room(turn, context_length, count) >= MIN_OBSERVATION_TOKENS * count

    def after(self, turn: Sequence[int], context_length: int, texts: Sequence[str]) -> Observation:
        """The ids after a turn.

        Args:
            turn: Its ids.
            context_length: Tokens of the episode, the turn included.
            texts: The answers.
        """
        room = self._room(turn, context_length, len(texts))
        share = min(self._config.max_observation_tokens, room // len(texts))
        found = self._suffix.after(turn, [self._cut(text, share) for text in texts])
        left = self._config.max_episode_tokens - context_length
        if len(found.token_ids) >= left:  # a template that writes more than the text
            found = self._suffix.after(turn, [CUT] * len(texts))
        return found

    def _room(self, turn: Sequence[int], context_length: int, count: int) -> int:
        """Tokens that so many answers may have, so that one token of a turn can follow."""
        frame = len(self._suffix.after(turn, [""] * count).token_ids)
        return self._config.max_episode_tokens - context_length - frame - 1

    def _cut(self, text: str, max_tokens: int) -> str:
        """A text of at most so many tokens, and a mark where it was cut."""
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        found = cast("list[int]", ids["input_ids"])
        if len(found) <= max_tokens:
            return text
        size = len(cast("list[int]", self._tokenizer(CUT, add_special_tokens=False)["input_ids"]))
        kept = self._tokenizer.decode(found[: max(0, max_tokens - size)], skip_special_tokens=False)
        return f"{str(kept).rstrip(chr(0xFFFD))}{CUT}"

"""Observations after turns: answers, cut to what fits, framed by the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from lightrft.config import TrainConfig
from lightrft.datasets.suffix import Content, Observation, TurnSuffix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.engines.media.sources import ImageSource

# Of an observation that would not fit: less is not worth a turn.
MIN_OBSERVATION_TOKENS = 8
CUT = "[cut]"


class ImageRefusedError(ValueError):
    """Images of an answer cannot be shown to the model; the message says why."""


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

    def after(
        self, turn: Sequence[int], context_length: int, answers: Sequence[str | Content]
    ) -> Observation | None:
        """The ids after a turn; None if its images leave no room for another turn.

        Args:
            turn: Its ids.
            context_length: Tokens of the episode, the turn included.
            answers: To its calls.

        Raises:
            ImageRefusedError: Images of an answer alone have more than `max_observation_tokens`, or
                the model's processor or template refuses them.
        """
        contents = [(each,) if isinstance(each, str) else each for each in answers]
        try:
            sizes = [self._image_tokens(turn, each) for each in contents]
        except (ValueError, TypeError, IndexError) as error:
            raise ImageRefusedError(f"an answer's images cannot be shown: {error}") from error
        limit = self._config.max_observation_tokens
        if max(sizes) > limit:
            raise ImageRefusedError(
                f"the images of an answer have {max(sizes)} tokens, more than "
                f"--max_observation_tokens {limit}: raise it, or answer with smaller images"
            )
        room = self._room(turn, context_length, len(contents)) - sum(sizes)
        if sum(sizes) and room < MIN_OBSERVATION_TOKENS * len(contents):
            return None
        room_of_each = room // len(contents)
        pairs = zip(contents, sizes, strict=True)
        cut = [self._cut_content(each, min(limit - size, room_of_each)) for each, size in pairs]
        found = self._suffix.after(turn, cut)
        left = self._config.max_episode_tokens - context_length
        if len(found.token_ids) >= left:  # a template that writes more than the text
            if sum(sizes):
                return None
            found = self._suffix.after(turn, [CUT] * len(contents))
        return found

    def _image_tokens(self, turn: Sequence[int], content: Content) -> int:
        """Tokens that the images of an answer add to it."""
        images = [part for part in content if not isinstance(part, str)]
        if not images:
            return 0
        shown: Content = ("", *images)
        bare = len(self._suffix.after(turn, [""]).token_ids)
        return len(self._suffix.after(turn, [shown]).token_ids) - bare

    def _cut_content(self, content: Content, max_tokens: int) -> Content:
        """An answer whose texts have at most so many tokens together."""
        found: list[str | ImageSource] = []
        for part in content:
            if not isinstance(part, str):
                found.append(part)
                continue
            found.append(self._cut(part, max(0, max_tokens)))
            ids = self._tokenizer(part, add_special_tokens=False, split_special_tokens=True)
            max_tokens -= len(cast("list[int]", ids["input_ids"]))
        return tuple(found)

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

"""Turns of episodes: the prompt of each, the calls in it, and the observation after it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from lightrft.config import TrainConfig
from lightrft.datasets.media import as_parts
from lightrft.datasets.types import Prompt
from lightrft.engines.media.encoder import Encoder
from lightrft.engines.media.kinds import Media
from lightrft.engines.types import Completion, GenerationRequest
from lightrft.records.media import encode_prompt, encode_row
from lightrft.records.rollout import AnsweredCall
from lightrft.rollout.environments.calls import MalformedCallError, ToolCall, as_error
from lightrft.rollout.environments.episode import Episode
from lightrft.rollout.environments.episode_batch import (
    TURN_STEP,
    ChangedAnswerError,
    EpisodeBatch,
)
from lightrft.rollout.environments.observations import Observations
from lightrft.rollout.environments.pool import EnvironmentSpec, EpisodeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_IMAGE = {"type": "image"}
# More than a chat template writes before a turn, where it may begin to think for the model.
HEADER_TOKENS = 64


class Turns:
    """Turns as ids and as text.

    Args:
        config: Bounds of prompts, turns and episodes.
        tokenizer: Of the model.
        encoder: Of prompts with media.
        observations: Answers as ids.
        spec: Of all environments together.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        encoder: Encoder,
        observations: Observations,
        spec: EnvironmentSpec,
    ) -> None:
        self._config, self._tokenizer, self._encoder = config, tokenizer, encoder
        self._observations, self._spec = observations, spec

    def prepare(self, batch: EpisodeBatch, episode: Episode) -> None:
        """Adds the message of `reset` to the prompt of an episode.

        Raises:
            EpisodeError: The prompt is empty, too long, or images do not fit it.
        """
        num_images = len(episode.prompt.images)
        episode.prompt = self._with_reset_message(episode)
        before = batch.journal.recorded.resets.get(episode.sample_id)
        has_images = episode.prompt.images[num_images:]
        if has_images and before is not None and before["told"] != episode.reset_message:
            # Tokens alone do not tell one image from another.
            batch.start_over(episode, ChangedAnswerError("reset answered otherwise"))

    def _with_reset_message(self, episode: Episode) -> Prompt:
        """The prompt with texts and images at the end of its last user message."""
        prompt, given = episode.prompt, episode.reset_parts
        messages = [dict(message) for message in prompt.messages]
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        content = messages[last]["content"]
        if isinstance(content, str) and all(isinstance(part, str) for part in given):
            messages[last]["content"] = "".join((content, *map(str, given)))
        else:
            own = ({"type": "text", "text": p} if isinstance(p, str) else _IMAGE for p in given)
            messages[last]["content"] = [*as_parts(content), *own]
        if not messages[last]["content"]:
            raise EpisodeError("the row has no prompt, and reset gave none")
        if not any(given):
            return prompt
        images = tuple(part for part in given if not isinstance(part, str))
        media = prompt.media + Media({"image": images})
        found = self._rendered(episode, replace(prompt, media=media, messages=tuple(messages)))
        if len(found.token_ids) > self._config.prompt_max_len:
            raise EpisodeError(
                f"the prompt has {len(found.token_ids)} tokens with what reset added, more than "
                f"prompt_max_len {self._config.prompt_max_len}"
            )
        return found

    def _rendered(self, episode: Episode, prompt: Prompt) -> Prompt:
        """A prompt with text and ids of its messages and media."""
        tokenizer = episode.environment.tokenizer
        messages = [dict(message) for message in prompt.messages]
        text = cast(
            "str",
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        )
        if not prompt.media:
            ids = tuple(tokenizer([text], add_special_tokens=False)["input_ids"][0])
            return replace(prompt, text=text, token_ids=ids)
        try:
            encoded = encode_prompt(replace(prompt, text=text), self._encoder)
        except (ValueError, IndexError, StopIteration) as error:
            raise EpisodeError(f"the images of reset do not fit the prompt: {error}") from error
        return replace(prompt, text=text, token_ids=encoded.token_ids)

    def request(self, batch: EpisodeBatch, episode: Episode) -> GenerationRequest:
        """Of the next turn, which has random numbers of its own in whatever round."""
        context = episode.context
        media = encode_row(episode.as_rollout(), self._encoder)
        if media is not None:
            media = media.continued(context[len(media.token_ids) :])
        return GenerationRequest(
            prompt_token_ids=context,
            request_id=episode.request_id + TURN_STEP * len(episode.segments),
            max_tokens=self._observations.turn_tokens(len(context), batch.params.max_tokens),
            encoded=media,
        )

    def append(self, episode: Episode, turn: Completion) -> None:
        """Appends a turn that was sampled."""
        text = self._tokenizer.decode(turn.output_token_ids, skip_special_tokens=True)
        episode.add_turn(turn, str(text))

    def parse_turn(self, batch: EpisodeBatch, episode: Episode) -> None:
        """Finds the calls of the last turn, or ends the episode.

        A call whose answer nobody would see is not made.
        """
        turn = episode.last
        episode.pending.clear()
        calls, problem = ([], None) if turn is None else self._calls(episode, turn)
        may_follow = self._spec.answers_turns or self._may_follow(episode, max(1, len(calls)))
        if not (calls or problem) or not may_follow:
            episode.is_open = False
            return
        episode.pending += calls
        wrong = () if problem is None else (AnsweredCall("", {}, "malformed", as_error(problem)),)
        episode.answers.append([*wrong])
        for answer in wrong:
            batch.journal.answer(episode, answer)

    def _may_follow(self, episode: Episode, count: int) -> bool:
        """Whether so many answers would be seen, and another turn can follow them."""
        turn = episode.last
        if turn is None or turn.finish_reason != "stop":
            return False
        if len(episode.segments) >= self._config.max_turns:
            return False
        size = len(episode.context)
        return self._observations.has_room(turn.output_token_ids, size, count)

    def _calls(self, episode: Episode, turn: Completion) -> tuple[list[ToolCall], str | None]:
        """The calls in a turn, or the fault in them."""
        is_ended = turn.finish_reason == "stop"
        ids = turn.output_token_ids[:-1] if is_ended else turn.output_token_ids
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        header = turn.prompt_token_ids[-HEADER_TOKENS:]
        before = self._tokenizer.decode(header, skip_special_tokens=False)
        try:
            return episode.environment.parse(str(text), is_ended, str(before)), None
        except MalformedCallError as error:
            return [], str(error)

    def observe(self, batch: EpisodeBatch, episode: Episode) -> None:
        """Appends the answers of the last turn, or ends the episode.

        Raises:
            ImageRefusedError: Images of an answer cannot be shown.
        """
        turn, answers = episode.last, episode.answers[-1]
        if turn is None or answers[-1].ends_episode or not self._may_follow(episode, len(answers)):
            episode.is_open = False
            return
        found = self._observations.after(
            turn.output_token_ids, len(episode.context), [answer.shown for answer in answers]
        )
        if found is None:
            episode.is_open = False
            return
        episode.add_observation(found)
        batch.journal.observation(episode)

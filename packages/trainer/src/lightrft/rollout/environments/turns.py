"""Turns of episodes: their prompts, the calls in them, the answers, and answers as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightrft.config import RolloutOptions
from lightrft.datasets.chat_ids import ChatIds, Rendered
from lightrft.datasets.chat_template import RenderingError, template_of
from lightrft.datasets.media import as_parts
from lightrft.datasets.suffix import Content, TurnSuffix
from lightrft.datasets.types import Prompt
from lightrft.engines.media.media import Media
from lightrft.engines.types import Completion, GenerationRequest
from lightrft.records.media import encode_context, encode_prompt
from lightrft.records.rollout import Rollout, TurnSegment
from lightrft.records.sample_ledger import SampleEntry
from lightrft.rollout.environments.call_formats import MalformedCallError, ToolCall, read_calls
from lightrft.rollout.environments.episode import Episode
from lightrft.rollout.environments.pool import EnvironmentSpec
from lightrft.rollout.workers import EpisodeError

if TYPE_CHECKING:
    from lightrft.engines.media.sources import ImageSource


# Minimum tokens of an observation: shorter ones are not worth a turn.
MIN_OBSERVATION_TOKENS = 8
CUT = "[cut]"


class ImageRefusedError(EpisodeError):
    """Images of an answer cannot be shown to the model; the message says why."""


@dataclass(frozen=True, slots=True)
class Observations:
    """Answers as token ids.

    Args:
        config: Options `max_observation_tokens` and those that bound an episode.
        suffix: Renderer of answers.
    """

    config: RolloutOptions
    suffix: TurnSuffix

    @property
    def chat(self) -> ChatIds:
        """Token ids of conversations."""
        return self.suffix.chat

    def turn_tokens(self, context_length: int, max_tokens: int) -> int:
        """Return the limit of a turn: `max_tokens`, or what the episode has left."""
        return max(1, min(max_tokens, self.config.max_episode_tokens - context_length))

    def after(
        self, turn: Sequence[int], context_length: int, answers: Sequence[str | Content]
    ) -> Rendered | None:
        """Return the ids after a turn; None if its images leave no room for another turn.

        Args:
            turn: Ids of the turn.
            context_length: Tokens of the episode, including the turn.
            answers: Answers to its calls.

        Raises:
            ImageRefusedError: The images of an answer exceed `max_observation_tokens`, or the
                processor or template refuses them.
        """
        contents = [(each,) if isinstance(each, str) else each for each in answers]
        cut = self._fitted(turn, context_length, contents)
        if cut is None:
            return None
        rendered = self.suffix.after(turn, cut)
        left = self.config.max_episode_tokens - context_length
        if len(rendered.token_ids) >= left:  # the template writes more than the text
            if not all(isinstance(part, str) for each in contents for part in each):
                return None
            rendered = self.suffix.after(turn, [CUT] * len(contents))
        return rendered

    def _fitted(
        self, turn: Sequence[int], context_length: int, contents: Sequence[Content]
    ) -> list[Content] | None:
        """Cut answers to fit; return None if their images leave no room for another turn."""
        try:
            sizes = [self._image_tokens(turn, each) for each in contents]
        except RenderingError as error:
            raise ImageRefusedError(str(error)) from error
        limit = self.config.max_observation_tokens
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
        return [self._cut_content(each, min(limit - size, room_of_each)) for each, size in pairs]

    def shows(
        self,
        segment: TurnSegment,
        turn: Sequence[int],
        context_length: int,
        answers: Sequence[Content],
    ) -> bool:
        """Return whether the ids after a turn show these answers.

        Args:
            segment: Segment of the turn, with its observation.
            turn, context_length, answers: See `after`.
        """
        texts = [part for content in answers for part in content if isinstance(part, str)]
        spans = [list(segment.observation[start:stop]) for start, stop in segment.text_spans]
        # Most texts are shown unchanged; those cut, trimmed or with images are rendered again.
        is_text = len(texts) == sum(map(len, answers))
        if is_text and [self._ids(text) for text in texts] == spans:
            return True
        fitted = self._fitted(turn, context_length, answers) if answers else None
        forms = ([] if fitted is None else [fitted]) + [[(CUT,)] * len(answers)]
        return segment.observation in (self.suffix.after(turn, form).token_ids for form in forms)

    def _image_tokens(self, turn: Sequence[int], content: Content) -> int:
        """Count the tokens that an answer's images add to it."""
        images = [part for part in content if not isinstance(part, str)]
        if not images:
            return 0
        shown: Content = ("", *images)
        bare = len(self.suffix.after(turn, [""]).token_ids)
        return len(self.suffix.after(turn, [shown]).token_ids) - bare

    def _cut_content(self, content: Content, max_tokens: int) -> Content:
        """Cut an answer so that its texts have at most `max_tokens` together."""
        parts: list[str | ImageSource] = []
        for part in content:
            if not isinstance(part, str):
                parts.append(part)
                continue
            parts.append(self._cut(part, max(0, max_tokens)))
            max_tokens -= len(self._ids(part))
        return tuple(parts)

    def _room(self, turn: Sequence[int], context_length: int, count: int) -> int:
        """Count the tokens for `count` answers that leave a turn at least one token."""
        frame = len(self.suffix.after(turn, [""] * count).token_ids)
        return self.config.max_episode_tokens - context_length - frame - 1

    def _cut(self, text: str, max_tokens: int) -> str:
        """Cut a text to `max_tokens`, and mark where it was cut."""
        ids = self._ids(text)
        if len(ids) <= max_tokens:
            return text
        size = len(self._ids(CUT))
        kept = ids[: max(0, max_tokens - size)]
        text = str(self.chat.tokenizer.decode(kept, skip_special_tokens=False))
        return f"{text.rstrip(chr(0xFFFD))}{CUT}"

    def _ids(self, text: str) -> list[int]:
        return self.chat.encode_text(text, split_special_tokens=True)


_IMAGE = {"type": "image"}


@dataclass(frozen=True, slots=True)
class Turns(Observations):
    """Turns as ids and as text, with the answers behind them.

    Args:
        config, suffix: As in `Observations`.
        spec: Merged specification of all environments.
    """

    spec: EnvironmentSpec

    def with_reset_message(self, episode: Episode) -> Prompt:
        """Return the prompt with texts and images of `reset` in its last user message.

        Raises:
            EpisodeError: The prompt is empty, too long, or images do not fit it.
        """
        prompt, parts = episode.prompt, episode.reset_parts
        messages = [dict(message) for message in prompt.messages]
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        content = messages[last]["content"]
        if isinstance(content, str) and all(isinstance(part, str) for part in parts):
            messages[last]["content"] = "".join((content, *map(str, parts)))
        else:
            added = ({"type": "text", "text": p} if isinstance(p, str) else _IMAGE for p in parts)
            messages[last]["content"] = [*as_parts(content), *added]
        if not messages[last]["content"]:
            raise EpisodeError("the row has no prompt, and reset gave none")
        if not any(parts):
            return prompt
        images = tuple(part for part in parts if not isinstance(part, str))
        media = prompt.media + Media({"image": images})
        extended = self._rendered(episode, replace(prompt, media=media, messages=tuple(messages)))
        if len(extended.token_ids) > self.config.prompt_max_len:
            raise EpisodeError(
                f"the prompt has {len(extended.token_ids)} tokens with what reset added, more than "
                f"prompt_max_len {self.config.prompt_max_len}"
            )
        return extended

    def _rendered(self, episode: Episode, prompt: Prompt) -> Prompt:
        """Return a prompt with the text and ids of its messages and media."""
        tokenizer = episode.environment.tokenizer
        messages = [dict(message) for message in prompt.messages]
        text = template_of(tokenizer).render(messages, asks=True)
        try:
            self.chat.encoder.check_places(text, prompt.media)
            if not prompt.media:
                ids = tuple(tokenizer([text], add_special_tokens=False)["input_ids"][0])
                return replace(prompt, text=text, token_ids=ids)
            encoded = encode_prompt(replace(prompt, text=text), self.chat.encoder)
        except ValueError as error:
            raise EpisodeError(f"the images of reset do not fit the prompt: {error}") from error
        return replace(prompt, text=text, token_ids=encoded.token_ids)

    def request(self, episode: Episode, max_tokens: int) -> GenerationRequest:
        """Return the request of the next call, whose random numbers do not depend on the round."""
        context, so_far = episode.context, len(episode.turn_so_far)
        most = self._turn_tokens(episode, max_tokens) - so_far
        if episode.max_sampled is not None:
            most = min(most, episode.max_sampled - episode.num_sampled)
        media = encode_context(context, episode.prompt, episode.later, self.chat.encoder)
        return GenerationRequest(
            prompt_token_ids=context,
            request_id=episode.next_request_id,
            max_tokens=most,
            encoded=media,
        )

    def append(self, episode: Episode, part: Completion, max_tokens: int) -> None:
        """Append what was sampled; a turn cut by `max_sampled` stays open."""
        ids = (*episode.turn_so_far, *part.output_token_ids)
        is_cut = (
            episode.max_sampled is not None
            and part.finish_reason == "length"
            and len(ids) < self._turn_tokens(episode, max_tokens)
        )
        text = self.chat.tokenizer.decode(ids, skip_special_tokens=True)
        episode.add_turn(part, str(text), is_cut=is_cut)

    def _turn_tokens(self, episode: Episode, max_tokens: int) -> int:
        """Return the token limit of the turn that is sampled now."""
        before = len(episode.context) - len(episode.turn_so_far)
        return self.turn_tokens(before, max_tokens)

    def parse(self, episode: Episode) -> str | None:
        """Parse the calls of the last turn, or end the episode; return what is wrong with them.

        Calls whose answers would not fit are not made.
        """
        turn = episode.last
        episode.pending.clear()
        calls, problem = ([], None) if turn is None else self._calls(episode, turn)
        may_follow = self.spec.answers_turns or self._may_follow(episode, max(1, len(calls)))
        if not (calls or problem) or not may_follow:
            episode.is_open = False
        else:
            episode.pending += calls
        return problem

    def _may_follow(self, episode: Episode, count: int) -> bool:
        """Return whether `count` answers would fit, and another turn after them."""
        turn = episode.last
        if turn is None or turn.finish_reason != "stop":
            return False
        if episode.num_turns >= self.config.max_turns:
            return False
        room = self._room(turn.output_token_ids, len(episode.context), count)
        return room >= MIN_OBSERVATION_TOKENS * count

    def _calls(self, episode: Episode, turn: Completion) -> tuple[list[ToolCall], str | None]:
        """Return the calls in a turn, or what is wrong with them."""
        is_ended = turn.finish_reason == "stop"
        ids = turn.output_token_ids[:-1] if is_ended else turn.output_token_ids
        parse, context = episode.environment.parse, turn.prompt_token_ids
        try:
            return read_calls(parse, self.chat.tokenizer, ids, context, is_ended=is_ended), None
        except MalformedCallError as error:
            return [], str(error)

    def observe(self, episode: Episode) -> None:
        """Append the answers of the last turn, or end the episode.

        Raises:
            ImageRefusedError: Images of an answer cannot be shown.
        """
        turn, answers = episode.last, episode.answers[-1]
        rendered, is_last = None, answers[-1].ends_episode
        if turn is not None and not is_last and self._may_follow(episode, len(answers)):
            shown = [answer.shown for answer in answers]
            rendered = self.after(turn.output_token_ids, len(episode.context), shown)
        if rendered is None:
            episode.is_open = False
        else:
            episode.add_observation(rendered)

    def check_observations(self, rollout: Rollout, entry: SampleEntry) -> None:
        """Set the fault of `entry` if a turn is followed by anything but its answers."""
        completion, stop = rollout.completion, 0
        context = len(completion.prompt_token_ids)
        # A turn may have several calls of the engine; each but the last ends in an observation.
        shown = (segment for segment in rollout.segments if segment.observation)
        for number, segment in enumerate(shown):
            start, answers = stop, entry.answers.get(number, [])
            while stop < len(completion.is_sampled) and completion.is_sampled[stop]:
                stop += 1
            turn = completion.output_token_ids[start:stop]
            if not self.shows(segment, turn, context + stop, answers):
                entry.fault = f"turn {number}: what the model was shown is not what was answered"
                return
            stop += len(segment.observation)

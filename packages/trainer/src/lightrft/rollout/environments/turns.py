"""Turns of episodes: the prompt of each, the calls in it, and the observation after it."""

from __future__ import annotations

import time
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
from lightrft.rewards.types import RewardResult
from lightrft.rollout.environments.calls import (
    MalformedCallError,
    ToolCall,
    as_error,
    check_call,
)
from lightrft.rollout.environments.content import from_json
from lightrft.rollout.environments.episode import Episode
from lightrft.rollout.environments.episode_batch import (
    TURN_STEP,
    ChangedAnswerError,
    EpisodeBatch,
)
from lightrft.rollout.environments.observations import Observations
from lightrft.rollout.environments.pool import EnvironmentSpec, EpisodeError, Host

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


class Answers:
    """Work of hosts on episodes; runs in their threads.

    Args:
        config: Limits of calls.
        spec: Of all environments together.
        repeats_stateless: Tools without state are asked again when a journal is followed, since
            it names images and does not hold them.
    """

    def __init__(
        self, config: TrainConfig, spec: EnvironmentSpec, *, repeats_stateless: bool
    ) -> None:
        self._config, self._spec = config, spec
        self._repeats_stateless = repeats_stateless

    def reset(self, episode: Episode, host: Host) -> None:
        """Begins an episode."""
        episode.host_on(host, seconds=self._config.tool_timeout_seconds)

    def answer_calls(self, batch: EpisodeBatch, episode: Episode, host: Host) -> None:
        """Makes the calls of the last turn, in their order.

        Answers that the journal of a killed process has must be given again.
        """
        key = (episode.sample_id, len(episode.segments) - 1)
        known, answered = batch.journal.recorded.answers.get(key, []), episode.answers.pop()
        if episode.pending:
            seconds = self._config.tool_timeout_seconds
            episode.host_on(host, seconds=seconds, stateless=self._spec.stateless)
        episode.answers.append(answered)
        for call in episode.pending:
            before = known[len(answered)] if len(answered) < len(known) else None
            answer = self._execute_call(episode, call, host, before)
            if before is not None and before.said != answer.said:
                raise ChangedAnswerError(
                    f"turn {key[1]}: {call.name} answered {answer.text[:80]!r}, where the journal "
                    f"says {before.text[:80]!r}"
                )
            batch.journal.answer(episode, answer)
            answered.append(answer)
            if answer.ends_episode:
                break

    def _execute_call(
        self, episode: Episode, call: ToolCall, host: Host, before: AnsweredCall | None
    ) -> AnsweredCall:
        """One call and its answer; never an exception of the tool."""
        try:
            arguments = check_call(call, episode.environment.functions)
        except MalformedCallError as error:
            return AnsweredCall("", {}, "malformed", as_error(str(error)))
        limit = self._config.max_tool_calls
        if limit is not None and episode.num_calls >= limit:
            text = as_error(f"no calls are left: {limit} were allowed")
            return AnsweredCall(call.name, arguments, "refused", text)
        is_stateless = call.name in self._spec.stateless
        if before is not None and is_stateless and not self._repeats_stateless:
            return before
        start, deadline = time.perf_counter(), self._config.tool_timeout_seconds
        key, asked = str(episode.number), {"name": call.name, "arguments": arguments}
        answer = cast("dict[str, object]", host.ask("call", key, seconds=deadline, **asked))
        seconds, text = time.perf_counter() - start, str(answer["text"])
        if "error" in answer:
            return AnsweredCall(call.name, arguments, "error", text, seconds)
        content = from_json(answer.get("content"), f"an image that {call.name} answered with")
        is_last = "ends_episode" in answer
        return AnsweredCall(call.name, arguments, "ok", text, seconds, is_last, content)

    def reward(self, episode: Episode, host: Host) -> RewardResult:
        """The reward of an episode by its environment."""
        key, seconds = str(episode.number), self._config.tool_timeout_seconds
        if not episode.environment.spec.has_reward:
            return RewardResult(0.0)
        episode.host_on(host, seconds=seconds, stateless=self._spec.stateless)
        answer = host.ask("reward", key, seconds=seconds)
        host.ask("close", key, seconds=seconds)
        if answer is None:
            raise EpisodeError("get_reward returned None")
        total, parts = cast("tuple[float, dict[str, float]]", answer)
        return RewardResult(total, {str(episode.environment.spec.name): total, **parts})

"""Answers of environments on their hosts: to calls, and for the reward. No tokenizer here."""

from __future__ import annotations

import time
from typing import cast

from lightrft.config import TrainConfig
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
from lightrft.rollout.environments.episode_batch import ChangedAnswerError, EpisodeBatch
from lightrft.rollout.environments.pool import EnvironmentSpec, EpisodeError, Host


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

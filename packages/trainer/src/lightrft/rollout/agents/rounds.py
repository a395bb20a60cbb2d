"""Rounds of an endpoint: waiting calls become requests, completions become answers."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lightrft.config import ConfigError
from lightrft.datasets.chat_ids import ChatIds, ImageRenderingError
from lightrft.datasets.chat_template import RenderingError
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.rollout.agents.conversations import (
    MAX_KEPT_BYTES,
    MAX_PIXEL_BYTES,
    AgentEpisode,
    CalledTurn,
    Conversations,
)
from lightrft.rollout.agents.endpoint import WaitingCall
from lightrft.rollout.agents.http_server import HttpError
from lightrft.rollout.agents.messages import (
    CallOptions,
    ChatCall,
    Message,
    SpokenCall,
    refused,
)
from lightrft.rollout.environments.call_formats import (
    MARKS,
    CallParser,
    MalformedCallError,
    Marked,
    read_calls,
)
from lightrft.rollout.environments.calls import choose_parser, written_id

Sample = Callable[[SamplingParams, list[GenerationRequest]], list[Completion]]


class SamplingRule(Protocol):
    """Rule for the sampling options of a call.

    Attributes:
        defaults: Parameters that a client does not change.
    """

    defaults: SamplingParams

    def params(self, options: CallOptions) -> SamplingParams:
        """Return the parameters of one sample.

        Raises:
            HttpError: The client's options are not supported.
        """
        ...


@dataclass(slots=True)
class RunSampling:
    """Rule by which the run's options win, because training depends on them.

    Args:
        defaults: Sampling parameters of the run.
        takes_stops: Whether clients may set stop strings.
        differences: Ignored requests of clients by option; each is reported once.
    """

    defaults: SamplingParams
    takes_stops: bool = True
    differences: dict[str, str] = field(default_factory=dict)

    def params(self, options: CallOptions) -> SamplingParams:
        """Return the run's parameters with the client's stop strings."""
        if options.stop and not self.takes_stops:
            raise refused("stop is not supported by an engine of several ranks", "stop")
        names = "temperature", "top_p", "top_k", "min_p"
        known = dict(zip(names, self.defaults.distribution, strict=True))
        for name, value in options.sampling.items():
            # A seed only distinguishes equal calls, see `CallOptions.mark`.
            if name != "seed" and value != known[name]:
                self.differences.setdefault(name, f"{name} {known[name]:g} instead of {value:g}")
        return replace(self.defaults, n=1, stop=(*self.defaults.stop, *options.stop))


@dataclass(slots=True)
class ClientSampling:
    """Rule by which the client's options win, as on model servers.

    Args:
        defaults: Parameters that a client does not set.
    """

    defaults: SamplingParams

    def params(self, options: CallOptions) -> SamplingParams:
        """Return the defaults with the client's options."""
        values = dict(options.sampling)
        whole = {name: int(values.pop(name)) for name in ("seed", "top_k") if name in values}
        stop = (*self.defaults.stop, *options.stop)
        try:
            return replace(self.defaults, n=1, stop=stop, **whole, **values)  # type: ignore[arg-type]
        except ValueError as error:
            raise HttpError(400, str(error), code="invalid_sampling") from error


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """Limits of answers, and how to parse them.

    Args:
        chat: Token ids of conversations.
        tool_parser: Name of the format of tool calls.
        sampling: Rule for the sampling options of calls.
        max_tokens: Maximum number of tokens of a history with its answer.
        max_calls: Maximum number of calls of an episode; None sets no limit.
    """

    chat: ChatIds
    tool_parser: str
    sampling: SamplingRule
    max_tokens: int
    max_calls: int | None = None

    def asked(self, episode: AgentEpisode, call: ChatCall) -> list[CalledTurn]:
        """Return the turns of a call, ready to be sampled.

        Raises:
            HttpError: The call cannot be answered.
        """
        options = call.options
        after = episode.num_calls + options.num_choices
        if self.max_calls is not None and after > self.max_calls:
            text = f"no answers are left: an episode has {self.max_calls}"
            raise HttpError(403, text, code="call_limit")
        talk = episode.talk
        if talk.fullness > 1:
            text = (
                f"the conversations of an episode take at most {MAX_KEPT_BYTES} bytes, and the "
                f"pixels of its images {MAX_PIXEL_BYTES}"
            )
            raise HttpError(413, text, code="episode_too_large")
        self.sampling.params(options)
        if call.images and "image" not in self.chat.encoder.marks:
            raise refused("images are not supported: of this model only text is read", "messages")
        try:
            if call.tools:
                choose_parser(self.tool_parser, self.chat.tokenizer, call.tools)
        except ConfigError as error:
            raise HttpError(400, str(error), code="no_tool_format") from error
        encoder = talk.chat.encoder
        num_kept = encoder.num_kept
        try:
            turns = self._turns(talk, call)
        except HttpError:
            encoder.forget(num_kept)
            raise
        talk.pixel_bytes += encoder.bytes_since(num_kept)
        most = min(self.sampling.defaults.max_tokens, self.max_tokens - len(turns[0].context))
        for turn in turns:
            turn.max_tokens = min(turn.max_tokens or most, most)
        episode.num_calls = after
        return turns

    def _turns(self, talk: Conversations, call: ChatCall) -> list[CalledTurn]:
        try:
            turns = talk.ask(call)
        except RenderingError as error:
            is_image = isinstance(error, ImageRenderingError)
            code = "invalid_image" if is_image else "refused_by_template"
            raise HttpError(400, str(error), code=code) from error
        context = len(turns[0].context)
        if not 0 < context < self.max_tokens:
            text = (
                f"the conversation has {context} tokens, and an episode at most "
                f"{self.max_tokens}: no answer fits"
            )
            raise HttpError(400, text, code="context_length_exceeded")
        return turns

    def finish(self, turn: CalledTurn, completion: Completion) -> None:
        """Set the completion of a turn and the message that the client receives."""
        turn.completion = completion
        ids = completion.output_token_ids
        is_ended = completion.finish_reason == "stop"
        if ids and ids[-1] in self.chat.stop_ids:
            ids = ids[:-1]
        calls: tuple[SpokenCall, ...] = ()
        marks: tuple[str, ...] = MARKS
        if turn.call.tools:
            parse = choose_parser(self.tool_parser, self.chat.tokenizer, turn.call.tools)
            marks += parse.begins if isinstance(parse, Marked) else ()
            try:
                calls = self._calls(parse, turn, ids, is_ended=is_ended)
            except MalformedCallError:
                turn.is_malformed = True
        whole = str(self.chat.tokenizer.decode(ids, skip_special_tokens=True))
        text = self._before_calls(ids, marks) if calls else whole
        for mark in turn.call.options.stop:
            text = text.partition(mark)[0]
        turn.message = Message("assistant", text, calls)

    def _before_calls(self, ids: Sequence[int], marks: Sequence[str]) -> str:
        """Return the text of an answer before its calls, whose marks may be special tokens."""

        def shown(count: int) -> str:
            return str(self.chat.tokenizer.decode(ids[:count], skip_special_tokens=False))

        text = shown(len(ids))
        thought = max(0, text.rfind("</think>"))
        places = [place for mark in marks if (place := text.find(mark, thought)) >= 0]
        places = places or [place for mark in marks if (place := text.find(mark)) >= 0]
        if not places:
            return ""
        end = min(places)
        # A token may hold the end of the text and the beginning of the mark.
        count = bisect_right(range(len(ids) + 1), end, key=lambda count: len(shown(count))) - 1
        before = str(self.chat.tokenizer.decode(ids[:count], skip_special_tokens=True))
        return before + text[len(shown(count)) : end]

    def _calls(
        self, parse: CallParser, turn: CalledTurn, ids: Sequence[int], *, is_ended: bool
    ) -> tuple[SpokenCall, ...]:
        spoken = []
        sampled = read_calls(parse, self.chat.tokenizer, ids, turn.context, is_ended=is_ended)
        for number, call in enumerate(sampled):
            name = hashlib.blake2b(f"{turn.request_id}:{number}".encode(), digest_size=4)
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            call_id = written_id(call, sampled)
            if not call_id or not self.chat.takes_id(call_id):
                # Mistral's templates require ids of nine letters and digits.
                call_id = f"c{name.hexdigest()}"
            spoken.append(SpokenCall(call_id, call.name, arguments))
        return tuple(spoken)


def answer_round(
    calls: Sequence[WaitingCall], rules: AnswerRules, sample: Sample
) -> list[tuple[AgentEpisode, CalledTurn]]:
    """Answer calls: repeated ones from memory, the others with one batch.

    Args:
        calls: Waiting calls; those of disconnected clients are dropped.
        rules: Limits of answers.
        sample: Function that generates; it is called once per set of sampling options, and at
            least once.

    Returns:
        New turns with their episodes, in the order of episodes and contexts.
    """
    asked: list[tuple[WaitingCall, list[CalledTurn]]] = []
    for waiting in sorted(calls, key=lambda each: each.episode.sample_id):
        if waiting.is_gone or not waiting.episode.is_open:
            continue
        before = waiting.episode.talk.find_retry(waiting.call, is_retry=waiting.is_retry)
        if before is not None:
            waiting.resolve(before)
            continue
        try:
            asked.append((waiting, rules.asked(waiting.episode, waiting.call)))
        except HttpError as error:
            waiting.resolve(error)
    _sample(asked, rules, sample)
    made: list[tuple[AgentEpisode, CalledTurn]] = []
    for waiting, turns in asked:
        episode = waiting.episode
        episode.talk.answered(turns)
        waiting.resolve(turns)
        made += [(episode, turn) for turn in turns]
    return made


def _sample(
    asked: Sequence[tuple[WaitingCall, list[CalledTurn]]], rules: AnswerRules, sample: Sample
) -> None:
    groups: dict[SamplingParams, list[CalledTurn]] = {}
    for waiting, turns in asked:
        known = waiting.episode.known
        for turn in turns:
            if turn.request_id in known:
                before = replace(known[turn.request_id], prompt_token_ids=turn.context)
                rules.finish(turn, before)
            else:
                groups.setdefault(rules.sampling.params(turn.call.options), []).append(turn)
    # All ranks that share an engine must make each of its calls.
    for params, turns in (groups or {rules.sampling.params(CallOptions()): []}).items():
        turns.sort(key=lambda turn: turn.order)
        # The choices of one call share `before`, and with it the pixels of their context.
        calls = {id(turn.before): turn for turn in turns}
        media = {key: turn.encoded(rules.chat.encoder) for key, turn in calls.items()}
        completions = sample(params, [turn.request(media[id(turn.before)]) for turn in turns])
        for turn, completion in zip(turns, completions, strict=True):
            rules.finish(turn, completion)

"""Conversations of one episode: every call with its exact token ids, and their branches.

If a call's history begins with an earlier call and its answer, the call continues their token ids,
and only the new messages are rendered. Any other history is rendered in full. The calls of an
episode therefore form trees. At the end, the trees are split into rows so that every delivered
answer is in exactly one row.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from lightrft.datasets.chat_ids import ChatIds, Rendered
from lightrft.datasets.chat_template import answering, call_of
from lightrft.datasets.messages import Message as TemplateMessage
from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import hash_context
from lightrft.engines.media.media import EncodedPrompt, LaterImages, Media
from lightrft.engines.media.text_encoder import Encoder
from lightrft.engines.types import Completion, GenerationRequest
from lightrft.records.media import encode_context
from lightrft.records.rollout import ResponseTurns, Rollout
from lightrft.records.table import branch_id
from lightrft.rewards.types import RewardResult
from lightrft.rollout.agents.messages import ChatCall, Json, Message, SpokenCall, chain_of
from lightrft.rollout.source import AGENT_COUNTS
from lightrft.rollout.transcript import Transcript

# Approximate limit for one episode; ids and their log probabilities take the most.
MAX_KEPT_BYTES = 1 << 28
# Limit for the pixels of its images, as the model reads them.
MAX_PIXEL_BYTES = 1 << 32
_BYTES_A_TOKEN = 100
# Message of an answer that is not sampled yet.
NOTHING_SAID = Message("assistant", "")


@dataclass(slots=True, eq=False)
class CalledTurn:
    """One answer that a client requested.

    Args:
        call: The request.
        before: Rendered ids before the answer: the whole prompt, or those after the parent's.
        parent: The turn that this one continues; None if its history starts a new tree.
        copy: Index among the episode's turns with the same context and options.
        request_id: Id from episode, context, options and copy; it seeds the random numbers.
        max_tokens: Maximum number of tokens of the answer.
        completion: The sampled answer; None until it is sampled.
        message: The message that the client receives; empty until it is sampled.
        is_delivered: Whether the client has received the answer.
        children: Turns that continue this one.
    """

    call: ChatCall
    before: Rendered
    parent: CalledTurn | None
    copy: int
    request_id: int
    max_tokens: int
    completion: Completion | None = None
    message: Message = NOTHING_SAID
    is_malformed: bool = False
    is_delivered: bool = False
    children: list[CalledTurn] = field(default_factory=list)

    @property
    def path(self) -> list[CalledTurn]:
        """Turns from the first of its tree to this one."""
        turns: list[CalledTurn] = []
        turn: CalledTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def context(self) -> tuple[int, ...]:
        """Ids that the answer continues; computed on demand, as storing all costs memory."""
        earlier = self.path[:-1]
        pieces = ((t.before.token_ids, t.sampled.output_token_ids) for t in earlier)
        return (*chain.from_iterable(chain.from_iterable(pieces)), *self.before.token_ids)

    @property
    def later(self) -> tuple[LaterImages, ...]:
        """Images in the context, with their positions in it."""
        images, size = list[LaterImages](), 0
        for turn in self.path:
            images += [replace(each, start=each.start + size) for each in turn.before.later]
            size += len(turn.before.token_ids)
            size += 0 if turn is self else len(turn.sampled.output_token_ids)
        return tuple(images)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Context and answer."""
        return (*self.context, *self.sampled.output_token_ids)

    @property
    def sampled(self) -> Completion:
        """The sampled answer.

        Raises:
            ValueError: Nothing is sampled yet.
        """
        if self.completion is None:
            raise ValueError("a turn without an answer has no tokens")
        return self.completion

    @property
    def order(self) -> tuple[tuple[int, ...], list[str], str, int]:
        """Sort key of turns that does not depend on the order of requests."""
        return self.context, _digests(self.later), self.call.options.mark, self.copy

    def encoded(self, encoder: Encoder) -> EncodedPrompt | None:
        """Return the context with its images encoded; None if it has no images."""
        return encode_context(self.context, None, self.later, encoder)

    def request(self, encoded: EncodedPrompt | None) -> GenerationRequest:
        """Return the request to the engine, with the images of its context."""
        bound = self.max_tokens
        return GenerationRequest(self.context, self.request_id, max_tokens=bound, encoded=encoded)


@dataclass(slots=True)
class Conversations:
    """Calls of one episode.

    Args:
        chat: Renderer of messages.
        episode_id: Id of the episode; determines the random numbers of its calls.
        repeats_seeds: Whether equal calls with a seed give equal answers, as on model servers.

    Attributes:
        kept_bytes: Approximate size of its turns.
        pixel_bytes: Size of its images, as the model reads them; callers count it.
    """

    chat: ChatIds
    episode_id: int
    repeats_seeds: bool = False
    turns: list[CalledTurn] = field(default_factory=list)
    _known: dict[bytes, list[CalledTurn]] = field(default_factory=dict)
    _asked: dict[bytes, list[list[CalledTurn]]] = field(default_factory=dict)
    _copies: Counter[str] = field(default_factory=Counter)
    # Each history repeats the one before, so equal messages and tools are stored once.
    _messages: dict[Message, Message] = field(default_factory=dict)
    _tools: dict[bytes, tuple[Json, ...]] = field(default_factory=dict)
    kept_bytes: int = 0
    pixel_bytes: int = 0

    @property
    def fullness(self) -> float:
        """Used share of the limits; callers must keep it at 1 or below."""
        return max(self.kept_bytes / MAX_KEPT_BYTES, self.pixel_bytes / MAX_PIXEL_BYTES)

    def find_retry(self, call: ChatCall, *, is_retry: bool) -> list[CalledTurn] | None:
        """Return answers to an equal call that the client never received; None if there are none.

        Args:
            call: The request.
            is_retry: Whether the client marks the call as a retry, even of a received answer.
        """
        asked = self._asked.get(call.fingerprint, [])
        lost = [turns for turns in asked if not turns[0].is_delivered]
        return next(iter(lost), asked[-1] if asked and is_retry else None)

    def ask(self, call: ChatCall) -> list[CalledTurn]:
        """Return the turns of a call, not yet sampled; `max_tokens` is the client's, or 0.

        Raises:
            RenderingError: The chat template cannot render its messages.
        """
        call = self._kept_once(call)
        parent, before = self.place(call)
        context = before.token_ids if parent is None else (*parent.token_ids, *before.token_ids)
        # Placeholder ids of images do not depend on the content.
        images = "".join(image.digest for image in call.images)
        is_repeated = self.repeats_seeds and "seed" in call.options.sampling
        mark = "" if is_repeated else call.options.mark
        digest, turns = hash_context(context) + images + mark, []
        for choice in range(call.options.num_choices):
            copy = choice if is_repeated else self._copies[digest]
            self._copies[digest] += 1
            name = f"{self.episode_id}:{digest}:{copy}".encode()
            number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 2
            bound = call.options.max_tokens or 0
            turns.append(CalledTurn(call, before, parent, copy, number, bound))
        return turns

    def answered(self, turns: Sequence[CalledTurn]) -> None:
        """Add the sampled turns of one call."""
        call = turns[0].call
        for turn in turns:
            self.turns.append(turn)
            num_tokens = len(turn.before.token_ids) + len(turn.sampled.output_token_ids)
            self.kept_bytes += _BYTES_A_TOKEN * num_tokens + 8 * len(call.messages)
            if turn.parent is not None:
                turn.parent.children.append(turn)
            if call.messages:
                chain = chain_of(call.tools_key, (*call.messages, turn.message))
                self._known.setdefault(chain[-1], []).append(turn)
        self._asked.setdefault(call.fingerprint, []).append(list(turns))

    def branches(self) -> list[list[CalledTurn]]:
        """Return rows: paths of delivered turns, with each turn in one row.

        If several turns continue one turn, the first in order of their ids continues the row, and
        each other one begins a new row. The rows therefore do not depend on the order of arrival.
        """
        kept = _kept(self.turns)
        rows: list[list[CalledTurn]] = []
        waiting = sorted((t for t in kept if t.parent is None), key=_among_siblings, reverse=True)
        while waiting:
            row = [waiting.pop()]
            while following := sorted(
                (t for t in row[-1].children if t in kept), key=_among_siblings
            ):
                row.append(following[0])
                waiting += reversed(following[1:])
            rows.append(row)
        return rows

    def _kept_once(self, call: ChatCall) -> ChatCall:
        messages = []
        for message in call.messages:
            if message not in self._messages:
                self.kept_bytes += message.num_bytes
            messages.append(self._messages.setdefault(message, message))
        tools = call.tools
        if tools:
            if call.tools_key not in self._tools:
                self.kept_bytes += len(repr(tools))
            tools = self._tools.setdefault(call.tools_key, tools)
        return replace(call, messages=tuple(messages), tools=tools)

    def place(self, call: ChatCall) -> tuple[CalledTurn | None, Rendered]:
        """Return the turn that a call continues, if any, and the rendered new messages."""
        if call.text is not None:
            return None, self.chat.text(call.text)
        chain = chain_of(call.tools_key, call.messages)
        for count in range(len(chain) - 1, 0, -1):
            known = self._known.get(chain[count - 1])
            if known:
                # Answers may have equal texts: choose independently of their order of arrival.
                parent = known[0] if len(known) == 1 else min(known, key=lambda t: t.order)
                new = template_messages(call.messages)[count:]
                calls = template_calls(parent.message.calls)
                turn = parent.sampled.output_token_ids
                return parent, self.chat.suffix(turn, calls, new)
        return None, self.chat.prompt(template_messages(call.messages), call.tools)


@dataclass(slots=True)
class AgentEpisode:
    """An episode in progress.

    Args:
        number: Index among the episodes of this rank.
        prompt: The data row.
        group_id, sample_id: As in `Rollout`.
        row: Row that the agent receives.
        talk: Calls of the agent.
        is_open: Whether calls are accepted.
        known: Earlier completions by request id, from a killed process or before the agent was
            restarted.
    """

    number: int
    prompt: Prompt
    group_id: int
    sample_id: int
    row: dict[str, object]
    talk: Conversations
    key: str = ""
    known: dict[int, Completion] = field(default_factory=dict)
    is_open: bool = True
    failure: str = ""
    reward: RewardResult | None = None
    num_calls: int = 0
    num_restarts: int = 0

    def restart(self) -> None:
        """Discard all calls, but keep their answers for equal calls."""
        self.known |= {turn.request_id: turn.sampled for turn in self.talk.turns}
        before = self.talk
        self.talk = Conversations(before.chat, before.episode_id, before.repeats_seeds)
        self.num_calls, self.num_restarts = 0, self.num_restarts + 1

    @property
    def rows(self) -> list[list[CalledTurn]]:
        """Turns of its rows; a failed episode is one row without any."""
        return ([] if self.failure else self.talk.branches()) or [[]]

    def rollouts(self) -> list[Rollout]:
        """Return at least one row; the first represents the episode.

        A failed episode is one row without tokens.
        """
        return [self.to_rollout(number, row) for number, row in enumerate(self.rows)]

    def to_rollout(self, number: int, turns: list[CalledTurn]) -> Rollout:
        """Make the rollout of one branch of turns."""
        row, request_id = Transcript(prompt=self.prompt), self.talk.episode_id
        if turns:
            # The agent chose which parts of the row the model sees.
            ids, request_id = turns[0].context, turns[-1].sampled.request_id
            row.prompt = replace(self.prompt, token_ids=ids, messages=(), media=Media())
            row.later += turns[0].later
        for place, turn in enumerate(turns):
            if place:
                row.add_observation(turn.before)
            row.add_turn(turn.sampled, turn.message.text)
        return row.as_sample(
            request_id,
            self.group_id,
            branch_id(self.sample_id, number),
            text="\n".join(filter(None, row.turn_texts)),
            conversation=ResponseTurns(tuple(row.turn_texts), (), self.num_restarts),
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of its calls by name, for metrics."""
        rows, turns = self.talk.branches(), self.talk.turns
        num_lost = len(turns) - sum(map(len, rows))
        num_malformed = sum(turn.is_malformed for turn in turns)
        counts = len(turns), num_lost, len(rows), num_malformed, self.num_restarts
        return dict(zip(AGENT_COUNTS, counts, strict=True))


def _among_siblings(turn: CalledTurn) -> tuple[tuple[int, ...], list[str], str, int]:
    """Return the sort key of turns with one parent, whose contexts differ only at the end."""
    rendered = turn.before
    return rendered.token_ids, _digests(rendered.later), turn.call.options.mark, turn.copy


def _digests(later: Sequence[LaterImages]) -> list[str]:
    return [image.digest for each in later for image in each.images]


def _kept(turns: Sequence[CalledTurn]) -> set[CalledTurn]:
    """Return turns whose answers were delivered, and the turns that they continue."""
    kept: set[CalledTurn] = set()
    for turn in turns:
        each: CalledTurn | None = turn if turn.is_delivered else None
        while each is not None and each not in kept:
            kept.add(each)
            each = each.parent
    return kept


def template_messages(messages: Sequence[Message]) -> list[TemplateMessage]:
    """Convert messages to the form of chat templates; results name their tools."""
    items = list[TemplateMessage]()
    for message in messages:
        item: TemplateMessage = {"role": message.role, "content": message.content or message.text}
        if message.calls:
            item["tool_calls"] = template_calls(message.calls)
        if message.role == "tool":
            item["tool_call_id"] = message.call_id
        items.append(item)
    return answering(items)


def template_calls(calls: Sequence[SpokenCall]) -> list[TemplateMessage]:
    """Convert calls to the form of OpenAI's protocol and chat templates."""
    return [call_of(call.id, call.name, call.arguments) for call in calls]

"""Conversations of one episode: every call with its exact ids, and the branches that they form.

A call whose history begins with one that was answered before, the answer included, continues its
ids, and only what is new is rendered. Any other history is rendered in full. So the calls of an
episode are trees; rows are read off at the end, such that every sampled token is in one of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.messages import Message as TemplateMessage
from lightrft.datasets.rendered import Rendered
from lightrft.engines.ledger import hash_context
from lightrft.engines.media.media import EncodedPrompt, Encoder, LaterImages
from lightrft.engines.types import Completion, GenerationRequest
from lightrft.records.media import encode_context
from lightrft.rollout.agents.messages import ChatCall, Json, Message, SpokenCall, chain_of

# Of what an episode holds, by rough count; ids and their log-probabilities take the most.
MAX_KEPT_BYTES = 1 << 28
# Of the pixels of its images, as the model reads them.
MAX_PIXEL_BYTES = 1 << 32
_BYTES_A_TOKEN = 100


@dataclass(slots=True, eq=False)
class CalledTurn:
    """One answer that a client asked for.

    Args:
        call: As it was asked.
        before: What was rendered for it: the whole prompt, or what follows its parent.
        parent: The turn that its history ends with; None for a history of its own.
        copy: Number among the turns of the episode in the same context with the same options.
        request_id: Fixes its random numbers; it follows from episode, context, options and copy.
        max_tokens: Of the answer.
        completion: What was sampled; None until then.
        message: What the client was told.
        is_delivered: The client has taken the answer.
        children: Turns that go on from it.
    """

    call: ChatCall
    before: Rendered
    parent: CalledTurn | None
    copy: int
    request_id: int
    max_tokens: int
    completion: Completion | None = None
    message: Message | None = None
    is_malformed: bool = False
    is_delivered: bool = False
    children: list[CalledTurn] = field(default_factory=list)

    @property
    def context(self) -> tuple[int, ...]:
        """Ids that the answer continues; made when asked for, or turns would hold them all."""
        pieces, turn = [self.before.token_ids], self.parent
        while turn is not None:
            pieces += [turn.sampled.output_token_ids, turn.before.token_ids]
            turn = turn.parent
        return tuple(chain.from_iterable(reversed(pieces)))

    @property
    def later(self) -> tuple[LaterImages, ...]:
        """Images in the context; they start at places of it."""
        found, stop, turn = list[LaterImages](), len(self.context), self
        while True:
            start = stop - len(turn.before.token_ids)
            own = [replace(each, start=each.start + start) for each in turn.before.later]
            found, parent = own + found, turn.parent
            if parent is None:
                return tuple(found)
            stop, turn = start - len(parent.sampled.output_token_ids), parent

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Context and answer."""
        return (*self.context, *self.sampled.output_token_ids)

    @property
    def sampled(self) -> Completion:
        """What was sampled.

        Raises:
            ValueError: Nothing was yet.
        """
        if self.completion is None:
            raise ValueError("a turn without an answer has no tokens")
        return self.completion

    @property
    def order(self) -> tuple[tuple[int, ...], list[str], str, int]:
        """Place among turns, whenever they were asked."""
        return self.context, _digests(self.later), self.call.options.mark, self.copy

    def encoded(self, encoder: Encoder) -> EncodedPrompt | None:
        """The context with its images; None without any."""
        return encode_context(self.context, None, self.later, encoder)

    def request(self, encoded: EncodedPrompt | None) -> GenerationRequest:
        """The request to the engine, with the images of its context."""
        bound = self.max_tokens
        return GenerationRequest(self.context, self.request_id, max_tokens=bound, encoded=encoded)


@dataclass(slots=True)
class Conversations:
    """The calls of one episode.

    Args:
        chat: Renders messages.
        episode_id: Of the episode; fixes the random numbers of its calls.
        repeats_seeds: A call with a seed is drawn alike whenever it comes, as by servers of models.

    Attributes:
        kept_bytes: Roughly what its turns hold.
        pixel_bytes: Of its images, as the model reads them; callers count them.
    """

    chat: ChatIds
    episode_id: int
    repeats_seeds: bool = False
    turns: list[CalledTurn] = field(default_factory=list)
    _known: dict[bytes, list[CalledTurn]] = field(default_factory=dict)
    _asked: dict[bytes, list[list[CalledTurn]]] = field(default_factory=dict)
    _copies: Counter[str] = field(default_factory=Counter)
    # Each history repeats the one before: equal messages and tools are kept once.
    _messages: dict[Message, Message] = field(default_factory=dict)
    _tools: dict[bytes, tuple[Json, ...]] = field(default_factory=dict)
    kept_bytes: int = 0
    pixel_bytes: int = 0

    @property
    def fullness(self) -> float:
        """Part of what it may hold; at most 1 is for callers to see to."""
        return max(self.kept_bytes / MAX_KEPT_BYTES, self.pixel_bytes / MAX_PIXEL_BYTES)

    def again(self, call: ChatCall, *, is_retry: bool) -> list[CalledTurn] | None:
        """The answers to an equal call that the client never got; None if there are none.

        Args:
            call: What is asked.
            is_retry: The client says that it asks again, whatever it got.
        """
        asked = self._asked.get(call.fingerprint, [])
        lost = [turns for turns in asked if not turns[0].is_delivered]
        return next(iter(lost), asked[-1] if asked and is_retry else None)

    def ask(self, call: ChatCall) -> list[CalledTurn]:
        """The turns of a call, to be sampled; `max_tokens` is the client's, or 0.

        Raises:
            RenderingError: The chat template cannot render its messages.
        """
        call = self._kept_once(call)
        parent, before = self.place(call)
        context = before.token_ids if parent is None else (*parent.token_ids, *before.token_ids)
        # Places of images have the same ids whatever they show.
        images = "".join(image.digest for image in call.images)
        is_repeated = self.repeats_seeds and "seed" in call.options.sampling
        mark = "" if is_repeated else call.options.mark
        digest, found = hash_context(context) + images + mark, []
        for choice in range(call.options.num_choices):
            copy = choice if is_repeated else self._copies[digest]
            self._copies[digest] += 1
            name = f"{self.episode_id}:{digest}:{copy}".encode()
            number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 2
            bound = call.options.max_tokens or 0
            found.append(CalledTurn(call, before, parent, copy, number, bound))
        return found

    def answered(self, turns: Sequence[CalledTurn]) -> None:
        """Takes the turns of one call, whose completions and messages are there."""
        call = turns[0].call
        for turn in turns:
            self.turns.append(turn)
            num_tokens = len(turn.before.token_ids) + len(turn.sampled.output_token_ids)
            self.kept_bytes += _BYTES_A_TOKEN * num_tokens + 8 * len(call.messages)
            if turn.parent is not None:
                turn.parent.children.append(turn)
            if turn.message is not None and call.messages:
                chain = chain_of(call.tools_key, (*call.messages, turn.message))
                self._known.setdefault(chain[-1], []).append(turn)
        self._asked.setdefault(call.fingerprint, []).append(list(turns))

    def branches(self) -> list[list[CalledTurn]]:
        """Rows: paths of delivered turns, each turn in one of them.

        Where several turns go on from one, the first of them in order of their ids continues the
        row, and each other one begins another. So the rows do not depend on the order of arrival.
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
        """The turn that a call goes on from, if there is one, and what is rendered for it."""
        if call.text is not None:
            return None, self.chat.text(call.text)
        chain = chain_of(call.tools_key, call.messages)
        for count in range(len(chain) - 1, 0, -1):
            known = self._known.get(chain[count - 1])
            if known:
                # Of answers with equal texts one must be chosen, the same whenever they came.
                parent = known[0] if len(known) == 1 else min(known, key=lambda t: t.order)
                new = template_messages(call.messages)[count:]
                calls = template_calls(parent.message.calls if parent.message else ())
                turn = parent.sampled.output_token_ids
                return parent, self.chat.suffix(turn, calls, new)
        return None, self.chat.prompt(template_messages(call.messages), call.tools)


def _among_siblings(turn: CalledTurn) -> tuple[tuple[int, ...], list[str], str, int]:
    """The order of turns with one parent, whose contexts differ in the end alone."""
    own = turn.before
    return own.token_ids, _digests(own.later), turn.call.options.mark, turn.copy


def _digests(later: Sequence[LaterImages]) -> list[str]:
    return [image.digest for each in later for image in each.images]


def _kept(turns: Sequence[CalledTurn]) -> set[CalledTurn]:
    """The turns whose answers a client has, or something that follows them."""
    found: set[CalledTurn] = set()
    for turn in turns:
        each: CalledTurn | None = turn if turn.is_delivered else None
        while each is not None and each not in found:
            found.add(each)
            each = each.parent
    return found


def template_messages(messages: Sequence[Message]) -> list[TemplateMessage]:
    """Messages as chat templates take them; results bear the names of their tools."""
    names = {call.id: call.name for message in messages for call in message.calls}
    found: list[TemplateMessage] = []
    for message in messages:
        item: TemplateMessage = {"role": message.role, "content": message.content or message.text}
        if message.calls:
            item["tool_calls"] = template_calls(message.calls)
        if message.role == "tool":
            name = names.get(message.call_id, "function")
            item |= {"name": name, "tool_call_id": message.call_id}
        found.append(item)
    return found


def template_calls(calls: Sequence[SpokenCall]) -> list[TemplateMessage]:
    """Calls as OpenAI's protocol and chat templates have them."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]

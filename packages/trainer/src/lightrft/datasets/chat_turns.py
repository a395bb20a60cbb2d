"""Trained tokens of conversations, located by comparing renderings of the chat template."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.chat_template import QUESTION
from lightrft.datasets.messages import ASSISTANT, CALLS, REASONING, Conversation, Message
from lightrft.datasets.types import DataError

# Marks of the beginning and the end of thinking with nothing between them.
_EMPTY_THINKING = re.compile(
    r"\s*(?P<mark><(\w+)>|\[(\w+)\]|<\|START_(\w+)\|>)\s*(?:</\2>|\[/\3\]|<\|END_\4\|>)\s*"
)
# Mark of the beginning of thinking at the end of a prompt.
_OPENED_THINKING = re.compile(r"(?:<\w+>|\[\w+\]|<\|START_\w+\|>)\s*\Z")
_MARKS = re.compile(r"<[^<>\s]+>|\[\w+\]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Turn:
    """Assistant turn behind its conversation.

    Args:
        token_ids: Ids of the conversation up to the turn's end-of-turn token, included.
        start: Place where the turn begins, behind a block of empty thinking.
        prompt: Text of the conversation before the turn.
        num_messages: Number of messages before the turn.
    """

    token_ids: tuple[int, ...]
    start: int
    prompt: str = ""
    num_messages: int = 0


class ChatTurns:
    """Assistant turns as token ids, exactly as the model would have to sample them.

    The prompt of turn k is the rendering of the messages before it with the generation prompt. The
    turn is the addition of the rendering with it, up to its end-of-turn token. Text behind that
    token (like a newline) is context. So is a block of empty thinking before it: prompts of models
    that must not think hold that block. Templates without an end-of-turn token end a turn by the
    special token that begins the next message.

    Args:
        chat: Token ids of conversations.

    Raises:
        TemplateRefusedError: There is no template, or it fails on a question and an answer or
            drops the answer.
    """

    def __init__(self, chat: ChatIds) -> None:
        self._chat, self._tokenizer = chat, chat.tokenizer
        self.template = chat.template
        chat.end_of_turn  # noqa: B018 - a template without turns is refused first

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Message] = ()
    ) -> tuple[tuple[int, ...], str]:
        """Return token ids of all messages, and their text.

        Raises:
            DataError: The template refuses the messages.
        """
        text = self.template.render(messages, tools)
        return tuple(self._chat.encode_text(text)), text

    def turns(self, talk: Conversation, *, start: int = 0, only_last: bool = False) -> list[Turn]:
        """Return the assistant's turns; messages behind the last of them are left out.

        Args:
            talk: Conversation; turns that its row excludes are context.
            start: Number of first messages that are only context.
            only_last: Whether the earlier turns are only context.

        Raises:
            DataError: There is no turn, or a turn is empty, is not rendered behind its prompt, has
                no end at which generation would stop, or has other tokens marked as generated.
        """
        messages, tools = talk.messages, talk.tools
        roles = [each["role"] for each in messages]
        places = [place for place in range(start, len(roles)) if roles[place] == ASSISTANT]
        if not places:
            raise DataError("no message of role assistant: there is nothing to train")
        if places[0] == 0:
            raise DataError("the conversation begins with an assistant's message: put a user first")
        chosen = [p for p in places[-1 if only_last else 0 :] if p not in talk.untrained]
        if not chosen:
            raise DataError(
                f"message {places[-1] + 1} is marked untrained, and no other is left to train: "
                "leave the row out"
            )
        return [self._turn(messages, place, tools) for place in chosen]

    def _turn(self, messages: Sequence[Message], place: int, tools: Sequence[Message]) -> Turn:
        prompt = self.template.render(messages[:place], tools, asks=True)
        head, answered = self._answered(messages, place, tools, prompt)
        # Both in one call: calls cost more than the encoding.
        encoded = self._tokenizer([prompt, answered], add_special_tokens=False)["input_ids"]
        before, whole = map(tuple, encoded)
        if whole[: len(before)] != before:
            raise DataError(_otherwise(prompt, answered, place))
        _require_thinking(messages[place], answered[len(prompt) :], place)
        ended = self._ended(messages, place, whole, len(before))
        turn = replace(ended, prompt=prompt, num_messages=place)
        is_closed = bool(self._closed_block) and prompt.endswith(self._closed_block)
        opened = _OPENED_THINKING.search(prompt)
        empty = _EMPTY_THINKING.match(answered, opened.start() if opened else len(prompt))
        if empty and empty.end() > len(prompt) and self._is_thinking(empty["mark"], tools):
            turn = replace(turn, start=self._places(answered, [empty.end()])[0])
            is_closed = True
        if is_closed and (thought := _thought_in(messages[place])):
            raise DataError(
                f"message {place + 1}: the chat template ends thinking before the content, which "
                f"begins with {thought[:60]!r}: put it into {REASONING}, or leave it out"
            )
        if _GENERATION.search(self._template(tools)):
            self._compare(turn, messages[: place + 1], tools, answered, len(prompt) - len(head))
        if (
            not _says_something(messages[place])
            or not self._tokenizer.decode(turn.token_ids[turn.start : -1]).strip()
        ):
            raise DataError(
                f"message {place + 1} is empty, and a model that is trained on it would learn to "
                'end at once: leave it out, or exclude it with "weight": 0'
            )
        return turn

    def _answered(
        self, messages: Sequence[Message], place: int, tools: Sequence[Message], prompt: str
    ) -> tuple[str, str]:
        """Return the prompt as history shows it, and the real prompt with the turn behind it.

        Templates drop thinking of earlier turns once the last one is a final answer, and show no
        block of empty thinking, with which prompts of models that must not think end.
        """
        answered = self.template.render(messages[: place + 1], tools)
        if answered.startswith(prompt):
            return prompt, answered
        bare = [
            {key: value for key, value in each.items() if key != REASONING}
            for each in messages[:place]
        ]
        heads = [self.template.render(bare, tools, asks=True)] if bare != messages[:place] else []
        block = self._closed_block
        if block and prompt.endswith(block):
            heads.append(prompt.removesuffix(block))
        for head in heads:
            turn = answered[len(head) :]
            if answered.startswith(head) and not turn.startswith(tuple(_MARKS.findall(block)[:1])):
                return head, prompt + turn
        raise DataError(_otherwise(prompt, answered, place))

    @cached_property
    def _closed_block(self) -> str:
        """Block of empty thinking that ends prompts and is not in history; "" without one."""
        mark = "answer"
        try:
            asked, plain = (self.template.render([QUESTION], asks=asks) for asks in (True, False))
            history = self.template.render([QUESTION, {"role": ASSISTANT, "content": mark}])
        except DataError:
            return ""
        if not (asked.startswith(plain) and history.startswith(plain)):
            return ""
        header, shown = asked[len(plain) :], history[len(plain) :].partition(mark)[0]
        block = header.removeprefix(shown) if shown else ""
        is_closed = block != header and len(_MARKS.findall(block)) > 1
        return block if is_closed else ""

    def _ended(
        self,
        messages: Sequence[Message],
        place: int,
        whole: tuple[int, ...],
        start: int,
    ) -> Turn:
        """Return the turn from `start` of the ids to the token that ends it."""
        message = messages[place]
        end = self._chat.end_of(message)
        ends = [i for i in range(start, len(whole)) if whole[i] == end]
        if len(ends) > 1:
            raise DataError(
                f"message {place + 1} has {self._tokenizer.convert_ids_to_tokens(end)!r} in "
                "its text, which would end the turn in its middle: leave it out"
            )
        if ends:
            return Turn(whole[: ends[0] + 1], start)
        if end is None:
            # Behind another message, the template may drop the thinking of this one.
            first = self._chat.first_behind(message, messages[place + 1 : place + 2])
            if first is not None:
                return Turn((*whole, first), start)
        raise DataError(
            f"message {place + 1} ends in {self._tokenizer.decode(whole[-8:])!r}, which is no "
            "special token: a model that is trained on it would not stop; give a template whose "
            "turns end in one, and a tokenizer that knows it as special"
        )

    def _compare(
        self,
        turn: Turn,
        messages: Sequence[Message],
        tools: Sequence[Message],
        answered: str,
        shift: int,
    ) -> None:
        """Refuse a turn if the template marks other tokens by {% generation %}.

        Args:
            turn: Turn of the last message.
            messages, tools: Messages and tools of the rendering.
            answered: Text of the turn behind its prompt.
            shift: Number of characters that history lacks before the turn.
        """
        # Imported here: few templates have such marks.
        from transformers.utils.chat_template_utils import render_jinja_template

        spans: list[tuple[int, int]] = []

        def mark(shown: Sequence[Message]) -> str:
            (text,), (spans[:],) = render_jinja_template(
                [list(shown)],
                tools=list(tools) or None,
                chat_template=self._template(tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
            return str(text)

        self.template.apply(mark, messages)
        # By characters: transformers' mask of tokens runs to the end of the text if the last
        # character of a span has no token.
        ranges = [(first + shift, stop + shift) for first, stop in spans]
        ranges = [span for span in ranges if span[1] > len(turn.prompt)]
        edges = [self._places(answered, span) for span in ranges]
        marked = [place for first, stop in edges for place in range(first, stop)]
        if marked != [*range(turn.start, len(turn.token_ids))]:
            raise DataError(
                f"message {len(messages)}: the chat template marks "
                f"{''.join(answered[first:stop] for first, stop in ranges)!r} as generated, and "
                "what a model has to sample is "
                f"{self._tokenizer.decode(turn.token_ids[turn.start :])!r}: "
                "correct {% generation %} in the template (--chat_template), or leave it out"
            )

    def _is_thinking(self, mark: str, tools: Sequence[Message]) -> bool:
        """Return whether a mark stands for thinking: by its name, or because the model knows it."""
        known = mark in self._template(tools) or mark in self._tokenizer.get_added_vocab()
        return known or "think" in mark.lower()

    def _template(self, tools: Sequence[Message]) -> str:
        template = self._chat.renderer.chat_template
        if isinstance(template, str):
            return template
        return cast("str", self._tokenizer.get_chat_template(tools=list(tools) or None))

    def _places(self, text: str, characters: Sequence[int]) -> list[int]:
        """Return the index of the token that holds each of some characters of a text."""
        if not self._tokenizer.is_fast:
            raise DataError(
                "a chat template with empty thinking or {% generation %} needs a fast tokenizer, "
                f"which knows the place of each token: got {type(self._tokenizer).__name__}"
            )
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        stops = [stop for _, stop in encoded["offset_mapping"]]
        return [bisect_right(stops, each) for each in characters]


def _says_something(message: Message) -> bool:
    """Return whether a message has a content, calls or thinking."""
    content = message["content"]
    says = bool(content.strip()) if isinstance(content, str) else bool(content)
    return says or CALLS in message or REASONING in message


def _thought_in(message: Message) -> str:
    """Return the thinking in the content of a message; "" if there is none."""
    content = message["content"]
    before, closed, _ = content.partition("</think>") if isinstance(content, str) else ("", "", "")
    return before.rpartition("<think>")[2].strip() if closed else ""


def _require_thinking(message: Message, turn: str, place: int) -> None:
    """Raise a DataError if the template drops thinking of a message that is trained."""
    for thought in (_thought_in(message), str(message.get(REASONING) or "").strip()):
        if thought not in turn:
            raise DataError(
                f"message {place + 1}: the chat template drops its thinking {thought[:60]!r}: give "
                "a template that writes it (--chat_template FILE), or leave it out of the row"
            )


def _otherwise(prompt: str, answered: str, place: int) -> str:
    """Return an error about an answer that is not rendered behind the prompt that asks for it."""
    pairs = zip(prompt, answered, strict=False)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(prompt))
    start = max(equal - 20, 0)
    return (
        f"message {place + 1}: the chat template asks for it by {prompt[start : start + 80]!r} and "
        f"shows it as {answered[start : start + 80]!r}, whose tokens begin otherwise: what would "
        "be trained is not what is sampled; give another template (--chat_template), "
        "or its variable (as --chat_template_args enable_thinking=false), or change the beginning "
        "of the message; --train_on last_assistant trains the last turn alone"
    )

"""Answers of environments behind a model's turns: as whom they are sent, and what is shown.

`lightrft.datasets.chat_ids` gives the ids. Here results of calls become messages that the model's
chat template carries.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Literal

from lightrft.datasets.chat_ids import CALL, ChatIds, Rendered, Slot, refused, slots_of
from lightrft.datasets.chat_template import QUESTION, RenderingError
from lightrft.datasets.messages import REASONING_KEYS, Message
from lightrft.engines.media.sources import ImageSource

Role = Literal["tool", "user"]
# An answer: its texts and images in order.
Content = tuple[str | ImageSource, ...]
# Function that returns the calls in a turn, in the form of messages.
ReadCalls = Callable[[tuple[int, ...]], Sequence[Message]]


class TurnSuffix:
    """Observations as token ids behind a model's turns.

    Args:
        chat: Token ids of conversations.
        tools: Schemas of the tools that prompts show.
        has_system: Whether prompts begin with a system message.
        is_conversation: Whether observations are a user's replies, not results of calls.
        read_calls: Reader of the calls in a turn, whose names and ids some templates write before
            the results; None leaves them out.

    Attributes:
        chat: Token ids of conversations.
        role: Role under which results are sent: "user" if the template drops or refuses calls.
        shows_tools: Whether the template writes the tools into the prompt.
        differences: Ways in which the template renders the history differently than it was sampled.
            Training is exact all the same, but serving through the template is not the same.

    Raises:
        TemplateRefusedError: The template renders no history with observations.
    """

    def __init__(
        self,
        chat: ChatIds,
        *,
        tools: Sequence[Message] = (),
        has_system: bool = False,
        is_conversation: bool = False,
        read_calls: ReadCalls | None = None,
    ) -> None:
        self.chat, self._is_conversation = chat, is_conversation
        self._read_calls = read_calls and lru_cache(maxsize=256)(read_calls)
        self._mark = f"Q{secrets.token_hex(8)}Z"
        self.role: Role = self._find_role()
        self.shows_tools = chat.template.shows_tools([QUESTION], tools)
        try:
            self.differences = tuple(self._differences(tools, has_system))
        except RenderingError as error:
            raise refused(f"it fails on a prompt like those of the data: {error}") from error

    def after(self, turn: Sequence[int], answers: Sequence[str | Content]) -> Rendered:
        """Return the suffix of a sampled turn: its missing end, the observations, the next header.

        Args:
            turn: Sampled ids, with the stop token at the end.
            answers: Results of the turn's calls, in their order.
        """
        calls = self._calls(turn, len(answers))
        try:
            return self.chat.after(turn, calls, *self._results(answers))
        except RenderingError:  # some templates refuse the model's ids
            if not calls:
                raise
            calls = _neutral_calls(len(answers))
            return self.chat.after(turn, calls, *self._results(answers))

    def _calls(self, turn: Sequence[int], count: int) -> list[Message]:
        """Return the calls that `count` results answer."""
        if self.role == "user":
            return []
        calls = [] if self._read_calls is None else [*self._read_calls(tuple(turn))]
        is_safe = len(calls) == count and not self.chat.forges(calls)
        return calls if is_safe else _neutral_calls(count)

    def _find_role(self) -> Role:
        """Return the role for results: a tool after a call, or a user after a text."""
        self.chat.end_of_turn  # noqa: B018 - a template without turns is refused first
        tried: list[list[str | Content]] = [["ok"], ["ok", "ok"]]
        if self.chat.encoder.reads_media:
            tried.append([("ok", ImageSource("image", content=b""))])
        roles: tuple[Role, ...] = ("user",) if self._is_conversation else ("tool", "user")
        reasons = list[str]()
        for self.role in roles:
            try:
                for answers in tried:
                    calls = _neutral_calls(len(answers)) if self.role == "tool" else []
                    self.chat.pieces(calls, *self._results(answers))
            except RenderingError as error:
                reasons.append(f"results as messages of role {self.role}: {error}")
            else:
                return self.role
        raise refused("; ".join(reasons))

    def _results(self, answers: Sequence[str | Content]) -> tuple[list[Message], list[Slot]]:
        """Return the messages with the answers to calls, and the places of their texts."""
        contents = [(each,) if isinstance(each, str) else each for each in answers]
        if self.role == "tool":
            results: list[Message] = [{"role": "tool", "content": each} for each in contents]
            return results, slots_of(results, lambda text: True)
        before, after = "<tool_response>\n", "\n</tool_response>"
        if self._is_conversation:
            before = after = ""
        parts, slots = list[str | ImageSource](), list[Slot]()
        for number, content in enumerate(contents):
            parts.append("\n" * bool(number) + before)
            slots += [
                (0, len(parts) + i) for i, part in enumerate(content) if isinstance(part, str)
            ]
            parts += [*content, after]
        return [{"role": "user", "content": tuple(parts)}], slots

    def _differences(self, tools: Sequence[Message], has_system: bool) -> Iterator[str]:
        """Yield how the template renders history differently than it is sampled and trained on."""
        system: Message = {"role": "system", "content": "system"}
        opening = [*([system] if has_system else []), QUESTION]
        text = f"{self._mark}y"
        turn: Message = {"role": "assistant", "content": text}
        results, _ = self._results(["ok"])
        if self.role == "tool":
            turn |= {"content": "", "tool_calls": [CALL]}
        prompt = self.chat.render(opening, tools)
        whole = self.chat.render([*opening, turn, *results], tools)
        if not whole.startswith(prompt):
            yield "the prompt is rendered otherwise once an answer follows it"
        elif self.role == "user" and not whole[len(prompt) :].startswith(text):
            yield "something is put before an answer once it is history"
        if self.chat.ends_otherwise:
            yield "the end of an answer is written otherwise once it is history"
        if self._strips_thinking(opening, tools):
            yield "thinking in earlier turns is stripped"

    def _strips_thinking(self, opening: list[Message], tools: Sequence[Message]) -> bool:
        """Return whether a turn loses its thinking, in its content or beside it, in history."""
        thought = f"{self._mark}t"
        turn: Message = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nyes"}
        if thought not in self.chat.render([*opening, turn, QUESTION], tools):
            return True
        for name in REASONING_KEYS:
            turn = {"role": "assistant", "content": "yes", name: thought}
            with suppress(RenderingError):
                if thought in self.chat.render([*opening, turn], tools, asks=False):
                    return thought not in self.chat.render([*opening, turn, QUESTION], tools)
        return False


def _neutral_calls(count: int) -> list[Message]:
    """Return calls whose names and ids stand for unknown ones."""
    # Mistral's templates require ids of nine letters and digits.
    return [{**CALL, "id": f"call{number:05d}"} for number in range(count)]

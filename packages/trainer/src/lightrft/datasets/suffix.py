"""Answers of environments behind a model's turns: as whom they are sent, and what is shown.

`lightrft.datasets.chat_ids` gives the ids. Here results of calls become messages that the model's
chat template carries.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Literal

from lightrft.datasets.chat_ids import ChatIds, Rendered, Slot, refused
from lightrft.datasets.chat_template import RenderingError
from lightrft.datasets.messages import Message
from lightrft.engines.media.sources import ImageSource

Role = Literal["tool", "user"]
# An answer: its texts and images in order.
Content = tuple[str | ImageSource, ...]
# Mistral's templates require ids of nine letters and digits.
CALL_ID = "call00000"
_CALL: Message = {
    "id": CALL_ID,
    "type": "function",
    "function": {"name": "function", "arguments": "{}"},
}
_QUESTION: Message = {"role": "user", "content": "question"}


class TurnSuffix:
    """Observations as token ids behind a model's turns.

    Args:
        chat: Token ids of conversations.
        tools: Schemas of the tools that prompts show.
        has_system: Whether prompts begin with a system message.
        is_conversation: Whether observations are a user's replies, not results of calls.

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
    ) -> None:
        self.chat, self._is_conversation = chat, is_conversation
        self._mark = f"Q{secrets.token_hex(8)}Z"
        self.role: Role = self._find_role()
        self.shows_tools = chat.template.shows_tools([_QUESTION], tools)
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
        messages, slots = self._results(answers)
        return self.chat.after(turn, self._calls, messages, slots)

    @property
    def _calls(self) -> list[Message]:
        """Calls of the turn that the results answer."""
        return [_CALL] if self.role == "tool" else []

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
                    self.chat.pieces(self._calls, *self._results(answers))
            except RenderingError as error:
                reasons.append(f"results as messages of role {self.role}: {error}")
            else:
                return self.role
        raise refused("; ".join(reasons))

    def _results(self, answers: Sequence[str | Content]) -> tuple[list[Message], list[Slot]]:
        """Return the messages with the answers, and the places of their texts."""
        contents = [(each,) if isinstance(each, str) else each for each in answers]
        if self.role == "tool":
            named: Message = {"role": "tool", "name": "function", "tool_call_id": CALL_ID}
            slots = [
                (number, place)
                for number, content in enumerate(contents)
                for place, part in enumerate(content)
                if isinstance(part, str)
            ]
            return [{**named, "content": content} for content in contents], slots
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
        opening = [*([system] if has_system else []), _QUESTION]
        text, thought = f"{self._mark}y", f"{self._mark}t"
        turn: Message = {"role": "assistant", "content": text}
        results, _ = self._results(["ok"])
        if self.role == "tool":
            turn |= {"content": "", "tool_calls": [_CALL]}
        prompt = self.chat.render(opening, tools)
        whole = self.chat.render([*opening, turn, *results], tools)
        if not whole.startswith(prompt):
            yield "the prompt is rendered otherwise once an answer follows it"
        elif self.role == "user" and not whole[len(prompt) :].startswith(text):
            yield "something is put before an answer once it is history"
        turn = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{text}"}
        more: Message = {"role": "user", "content": "more"}
        if thought not in self.chat.render([*opening, turn, more], tools):
            yield "thinking in earlier turns is stripped"

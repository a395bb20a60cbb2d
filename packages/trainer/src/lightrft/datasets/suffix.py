"""Token ids between two sampled turns, from one rendering of the model's chat template.

Sampled text is never rendered again: templates strip thinking, move system messages and join
differently. One conversation is rendered whose assistant turn holds a random word. The text behind
the end of that turn follows every turn. The text of an observation is encoded so that no part of it
can become a special token; otherwise a tool could speak as somebody else. Images stand where the
template puts them; the processor that expands their places reads only the template's pieces.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal, cast

from lightrft.datasets.rendered import PieceIds, Rendered
from lightrft.engines.media.sources import ImageSource
from lightrft.engines.media.text_encoder import TEXT_ENCODER, Encoder
from lightrft.engines.text import text_behind_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.datasets.media import VisionPrompts

Role = Literal["tool", "user"]
Message = dict[str, object]
# An answer: its texts and images in order.
Content = tuple[str | ImageSource, ...]
# For each answer, which of its parts are texts.
Shape = tuple[tuple[bool, ...], ...]
_TEXT: Shape = ((True,),)
# Mistral's templates require ids of nine letters and digits.
CALL_ID = "call00000"


class TemplateRefusedError(ValueError):
    """The chat template cannot carry turns with observations; the message says why."""


class TurnSuffix:
    """Observations as token ids behind a model's turns.

    Args:
        tokenizer: Tokenizer with a chat template.
        tools: Schemas of the tools that prompts show.
        has_system: Whether prompts begin with a system message.
        is_conversation: Whether observations are a user's replies, not results of calls.
        encoder: Encoder of prompts with media.

    Attributes:
        role: Role under which results are sent: "user" if the template drops or refuses calls.
        end_of_turn: Id that ends an assistant turn; None if the next turn's first token does.
        shows_tools: Whether the template writes the tools into the prompt.
        differences: Ways in which the template renders the history differently than it was sampled.
            Training is exact all the same, but serving through the template is not the same.

    Raises:
        TemplateRefusedError: The template renders no history with observations.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | VisionPrompts,
        *,
        tools: Sequence[dict[str, object]] = (),
        has_system: bool = False,
        is_conversation: bool = False,
        encoder: Encoder = TEXT_ENCODER,
    ) -> None:
        self._is_conversation, self._encoder = is_conversation, encoder
        if not tokenizer.chat_template:
            raise TemplateRefusedError(
                "environments need a chat template, and the tokenizer has none: give "
                "--chat_template FILE, or use an instruct model"
            )
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._mark = f"Q{secrets.token_hex(8)}Z"
        end = self.end_of_turn = self._find_end()
        self._end_text = "" if end is None else tokenizer.convert_ids_to_tokens(end)
        self._pieces = PieceIds(self._ids, encoder, end, self._end_text)
        self._frames: dict[Shape, tuple[str, ...]] = {}
        self._find_role()
        self.shows_tools = self._are_shown(tools)
        self.differences = self._differences(tools, has_system)

    def after(self, turn: Sequence[int], answers: Sequence[str | Content]) -> Rendered:
        """Return the suffix of a sampled turn: its missing end, the observations, the next header.

        Args:
            turn: Sampled ids, with the stop token at the end.
            answers: Results of the turn's calls, in their order.
        """
        contents = [(each,) if isinstance(each, str) else each for each in answers]
        shape = tuple(tuple(isinstance(part, str) for part in each) for each in contents)
        frame = self._frame(shape)
        texts = [part for part in chain(*contents) if isinstance(part, str)]
        images = [part for part in chain(*contents) if not isinstance(part, str)]
        shown = [self._shown(frame, shape, texts, index) for index in range(len(texts))]
        return self._pieces.after(turn, frame, shown, images)

    def _render(self, messages: list[Message], **options: object) -> str:
        arguments: dict[str, object] = {"tools": None, "add_generation_prompt": True, **options}
        return cast(
            "str",
            self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments),  # type: ignore[arg-type]
        )

    def _find_end(self) -> int | None:
        """Return the first special token after the content of an assistant turn."""
        try:
            rest = text_behind_answer(self._tokenizer)
        except Exception as error:  # a template is a program of the model's author
            raise _refused(f"it fails on an assistant turn: {error}") from error
        if rest is None:
            raise _refused("it drops what the assistant says")
        ids = self._ids(rest.lstrip())
        return ids[0] if ids and ids[0] in self._special else None

    def _find_role(self) -> None:
        """Find the role for results: a tool after a call, or a user after a text."""
        reasons = []
        # Some templates take the arguments of a call as an object, others as JSON.
        forms: tuple[tuple[Role, bool], ...] = (("tool", False), ("tool", True), ("user", False))
        if self._is_conversation:
            forms = forms[-1:]
        for self.role, self._arguments_are_text in forms:
            try:
                for shape in (
                    _TEXT,
                    _TEXT * 2,
                    *([((True, False),)] if self._encoder.reads_media else []),
                ):
                    self._frame(shape)
            except TemplateRefusedError as error:
                self._frames.clear()
                reasons.append(str(error))
            else:
                return
        raise _refused("; ".join(dict.fromkeys(reasons)))

    def _frame(self, shape: Shape) -> tuple[str, ...]:
        """Return the pieces of the suffix around the texts of observations, one more than texts."""
        if shape not in self._frames:
            self._frames[shape] = self._make_frame(shape)
        return self._frames[shape]

    def _make_frame(self, shape: Shape) -> tuple[str, ...]:
        marks = self._marks(shape)
        rest, pieces = self._rest(shape, marks), []
        for mark in marks:
            before, matched, rest = rest.partition(mark)
            if not matched or mark in rest:
                raise TemplateRefusedError(
                    f"a message of role {self.role} is dropped, moved or repeated"
                )
            pieces.append(before)
        frame = (*pieces, rest)
        num_images = sum(not is_text for is_text in chain(*shape))
        if sum(map(self._encoder.num_places, frame)) != num_images:
            raise TemplateRefusedError(
                f"an image in a message of role {self.role} is dropped or repeated"
            )
        return frame

    def _marks(self, shape: Shape) -> list[str]:
        return [f"{self._mark}x{index}x" for index in range(sum(chain(*shape)))]

    def _rest(self, shape: Shape, texts: Sequence[str]) -> str:
        """Return the text behind the marked assistant turn when these texts answer it."""
        messages = [_user("question"), self._answered_turn(), *self._results(shape, texts)]
        try:
            rendered = self._render(messages)
        except Exception as error:  # a template is a program of the model's author
            raise TemplateRefusedError(
                f"a message of role {self.role} is refused: {str(error)[:200]}"
            ) from error
        rest = _after_last(rendered, self._mark + "y")
        if rest is None:
            raise TemplateRefusedError("a tool call of the assistant is dropped")
        if self.end_of_turn is not None:
            _, matched, rest = rest.partition(self._end_text)
            if not matched:
                raise TemplateRefusedError("an assistant turn before others has no end")
            return rest
        place = self._first_special(rest)
        if place is None:
            raise TemplateRefusedError("nothing ends an assistant turn")
        return rest[place:]

    def _answered_turn(self) -> Message:
        mark = self._mark + "y"
        if self.role == "user":
            return _assistant(mark)
        arguments: object = {"value": mark}
        if self._arguments_are_text:
            arguments = f'{{"value": "{mark}"}}'
        function = {"name": "function", "arguments": arguments}
        call = {"id": CALL_ID, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def _results(self, shape: Shape, texts: Sequence[str]) -> list[Message]:
        """Return the messages with the answers: as texts if they have no images, else as parts."""
        remaining = iter(texts)
        contents: list[list[Message]] = [
            [_text(next(remaining)) if is_text else {"type": "image"} for is_text in each]
            for each in shape
        ]
        if self.role == "user":
            before, after = "<tool_response>\n", "\n</tool_response>"
            if self._is_conversation:
                before = after = ""
            parts = [
                part
                for number, content in enumerate(contents)
                for part in (_text("\n" * bool(number) + before), *content, _text(after))
            ]
            return [_user(_joined(parts))]
        return [
            {
                "role": "tool",
                "name": "function",
                "tool_call_id": CALL_ID,
                "content": _joined(content),
            }
            for content in contents
        ]

    def _shown(self, frame: tuple[str, ...], shape: Shape, texts: Sequence[str], index: int) -> str:
        """Return a text as the template writes it (trimmed, as JSON ...); else unchanged."""
        marks = self._marks(shape)
        marks[index] = texts[index]
        before = "".join(p + m for p, m in zip(frame[:index], marks[:index], strict=True))
        before += frame[index]
        pairs = zip(marks[index + 1 :], frame[index + 2 :], strict=True)
        after = frame[index + 1] + "".join(m + p for m, p in pairs)
        try:
            rest = self._rest(shape, marks)
        except TemplateRefusedError:
            return texts[index]
        fits = len(rest) >= len(before) + len(after)
        if fits and rest.startswith(before) and rest.endswith(after):
            return rest[len(before) : len(rest) - len(after)]
        return texts[index]

    def _first_special(self, text: str) -> int | None:
        """Return the position of the first special token in a text."""
        names = [self._tokenizer.convert_ids_to_tokens(i) for i in self._special]
        places = [place for name in names if (place := text.find(name)) >= 0]
        return min(places, default=None)

    def _ids(self, text: str, **options: bool) -> list[int]:
        """Return ids of a text; with `split_special_tokens` nothing becomes a special token."""
        ids = self._tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return cast("list[int]", ids)

    def _are_shown(self, tools: Sequence[dict[str, object]]) -> bool:
        name = f"f{self._mark}"
        parameters: dict[str, object] = {"type": "object", "properties": {}}
        function: dict[str, object] = {
            "name": name,
            "description": "Nothing.",
            "parameters": parameters,
        }
        try:
            shown = self._render(
                [_user("question")], tools=[*tools, {"type": "function", "function": function}]
            )
        except Exception:  # noqa: BLE001 - a template may raise anything; it then shows none
            return False
        return name in shown

    def _differences(self, tools: Sequence[dict[str, object]], has_system: bool) -> tuple[str, ...]:
        """Return how the template renders history differently than it is sampled and trained on."""
        system: Message = {"role": "system", "content": "system"}
        opening = [*([system] if has_system else []), _user("question")]
        shown = list(tools) or None
        differences = []
        try:
            prompt = self._render(opening, tools=shown)
            text = self._mark + "y"
            whole = self._render(
                [*opening, self._answered_turn(), *self._results(_TEXT, ["ok"])], tools=shown
            )
        except Exception as error:  # a template is a program of the model's author
            raise _refused(f"it fails on a prompt like those of the data: {error}") from error
        if not whole.startswith(prompt):
            differences.append("the prompt is rendered otherwise once an answer follows it")
        elif self.role == "user" and not whole[len(prompt) :].startswith(text):
            differences.append("something is put before an answer once it is history")
        thought = f"<think>\n{self._mark}t\n</think>\n\n{text}"
        answered = self._render([*opening, _assistant(thought), _user("more")], tools=shown)
        if f"{self._mark}t" not in answered:
            differences.append("thinking in earlier turns is stripped")
        return tuple(differences)


def _refused(reason: str) -> TemplateRefusedError:
    return TemplateRefusedError(
        f"the chat template cannot carry turns with observations: {reason}; give another with "
        "--chat_template FILE"
    )


def _after_last(text: str, mark: str) -> str | None:
    place = text.rfind(mark)
    return None if place < 0 else text[place + len(mark) :]


def _user(content: object) -> Message:
    return {"role": "user", "content": content}


def _text(text: str) -> Message:
    return {"type": "text", "text": text}


def _joined(parts: Sequence[Message]) -> object:
    """Join the parts to one text if all are texts."""
    if all("text" in part for part in parts):
        return "".join(str(part["text"]) for part in parts)
    return [part for part in parts if part.get("text") != ""]


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}

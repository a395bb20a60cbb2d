"""Trained tokens of conversations, found by comparing renderings of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from lightrft.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, object]
_MARK = "Qmark7Z"
_QUESTION: Message = {"role": "user", "content": "question"}


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn behind its conversation.

    Args:
        token_ids: Of the conversation up to the end of the turn, its end-of-turn token included.
        start: Where the turn begins.
    """

    token_ids: tuple[int, ...]
    start: int


class ChatTurns:
    """Assistant turns as token ids, just as the model would have to sample them.

    The prompt of turn k is the rendering of the messages before it with the generation prompt; the
    turn is what the rendering with it adds, up to its end-of-turn token. What stands behind that
    token (a newline, say) is context. Templates without such a token end a turn by the special
    token that begins the next message.

    Args:
        tokenizer: With a chat template.

    Raises:
        DataError: It has none, or the template fails on a question and an answer or drops the
            answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "conversations need a chat template, and the tokenizer has none: give "
                "--chat_template FILE, use an instruct model, or rows with prompt and completion"
            )
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(i for i, each in added if each.special)}
        text = self._render([_QUESTION, {"role": "assistant", "content": _MARK}])
        if _MARK not in text:
            raise DataError("the chat template drops what the assistant says: give another")
        first = self._ids(text.rpartition(_MARK)[2].lstrip())[:1]
        self._end = first[0] if first and first[0] in self._special else None

    def conversation(self, messages: Sequence[Message], tools: object = None) -> tuple[int, ...]:
        """Token ids of all messages.

        Raises:
            DataError: The template refuses them.
        """
        return self._ids(self._render(messages, tools))

    def turns(
        self,
        messages: Sequence[Message],
        tools: object = None,
        *,
        start: int = 0,
        only_last: bool = False,
    ) -> list[Turn]:
        """The assistant's turns; messages behind the last of them are left out.

        Args:
            messages: A conversation.
            tools: As the template takes them; None shows none.
            start: Turns of messages before it are context.
            only_last: The earlier turns are context.

        Raises:
            DataError: There is none, the rendering of a turn does not begin with that of its
                prompt, or nothing ends it at which a generation would stop.
        """
        roles = [each["role"] for each in messages]
        places = [place for place in range(start, len(roles)) if roles[place] == "assistant"]
        if not places:
            raise DataError("no message of role assistant: there is nothing to train")
        return [self._turn(messages, place, tools) for place in places[-1 if only_last else 0 :]]

    def _turn(self, messages: Sequence[Message], place: int, tools: object) -> Turn:
        if place == 0:
            raise DataError("the conversation begins with an assistant's message: put a user first")
        prompt = self._render(messages[:place], tools, add_generation_prompt=True)
        answered = self._render(messages[: place + 1], tools)
        before, whole = self._ids(prompt), self._ids(answered)
        if whole[: len(before)] != before:
            raise DataError(_otherwise(prompt, answered, place))
        ends = [i for i in range(len(before), len(whole)) if whole[i] == self._end]
        if len(ends) > 1:
            raise DataError(
                f"message {place + 1} has {self._tokenizer.convert_ids_to_tokens(self._end)!r} in "
                "its text, which would end the turn in its middle: leave it out"
            )
        if ends:
            return Turn(whole[: ends[0] + 1], len(before))
        following = (
            [*messages[: place + 2]] if place + 1 < len(messages) else [*messages, _QUESTION]
        )
        later = self._ids(self._render(following, tools))[: len(whole) + 1]
        if self._end is None and later[:-1] == whole and later[-1] in self._special:
            return Turn(later, len(before))
        raise DataError(
            f"message {place + 1} ends in {answered[-20:]!r}, which is no special token: a model "
            "that is trained on it would not stop; give a template whose turns end in one, and "
            "a tokenizer that knows it as special"
        )

    def _render(
        self,
        messages: Sequence[Message],
        tools: object = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as err:  # a template is a program of the model's author
            reason = " ".join(str(err).split())
            raise DataError(f"the chat template refused the messages: {reason}") from err
        return cast("str", text)

    def _ids(self, text: str) -> tuple[int, ...]:
        # The template writes the special tokens itself.
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _otherwise(prompt: str, answered: str, place: int) -> str:
    """The sentence about an answer that is rendered behind another prompt than it was asked by."""
    pairs = zip(prompt, answered, strict=False)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(prompt))
    start = max(equal - 20, 0)
    return (
        f"message {place + 1}: the chat template asks for it by {prompt[start : start + 80]!r} and "
        f"shows it as {answered[start : start + 80]!r}, whose tokens begin otherwise: what would "
        "be trained is not what is sampled; give another template (--chat_template), or change the "
        "beginning of the message; --train_on last_assistant trains the last turn alone"
    )

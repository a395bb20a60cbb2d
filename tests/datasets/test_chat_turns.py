"""Masks of assistant turns for chat templates of ten families."""

import pytest
from tests.datasets import chat_families
from tests.datasets.chat_families import FAMILIES
from tests.datasets.row_files import CHAT, family_tokenizer

from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.chat_turns import ChatTurns
from lightrft.datasets.messages import Conversation
from lightrft.datasets.types import DataError


def tokenizer_of(family):
    """The family's tokenizer; Qwen's does not join a newline and the mark that follows it."""
    return family_tokenizer(family, use_regex=family.startswith("Qwen"))


def trained_texts(tokenizer, turns):
    return [tokenizer.decode(turn.token_ids[turn.start :]) for turn in turns]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "DeepSeek"])
def test_only_the_last_turn_is_trained_where_that_is_asked_for(family):
    chat = ChatTurns(ChatIds(tokenizer_of(family)))
    turns = chat.turns(Conversation(CHAT))
    assert len(turns) == 2
    assert chat.turns(Conversation(CHAT), only_last=True) == turns[1:]


def test_a_template_that_asks_for_thinking_that_it_never_shows_is_refused():
    with pytest.raises(
        DataError, match=r"asks for it by .*<think>.* and shows it as .*begin otherwise"
    ):
        ChatTurns(ChatIds(tokenizer_of("DeepSeek"))).turns(Conversation(CHAT))


def test_a_turn_whose_first_token_joins_the_end_of_its_prompt_is_refused():
    joins = chat_families.family_tokenizer("Qwen2.5")
    chat = [CHAT[0], {"role": "assistant", "content": "\nok"}]
    with pytest.raises(
        DataError, match=r"asks for it by .*assistant\\n' and shows it as .*\\n\\nok"
    ):
        ChatTurns(ChatIds(joins)).turns(Conversation(chat))


@pytest.mark.parametrize("tags", ["<p></p>", "<div> </div>", "[b][/b]"])
def test_empty_tags_that_no_model_knows_are_trained(tags):
    tokenizer = tokenizer_of("Qwen2.5")
    turns = ChatTurns(ChatIds(tokenizer)).turns(
        Conversation([CHAT[0], {"role": "assistant", "content": f"{tags}ok."}])
    )
    assert trained_texts(tokenizer, turns) == [f"{tags}ok.<|im_end|>"]
    thought = [CHAT[0], {"role": "assistant", "content": "<think>\n</think>ok."}]
    turns = ChatTurns(ChatIds(tokenizer)).turns(Conversation(thought))
    assert trained_texts(tokenizer, turns) == ["ok.<|im_end|>"]

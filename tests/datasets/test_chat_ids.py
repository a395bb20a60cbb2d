"""Messages of clients as token ids, against the suffixes of environments and whole renderings."""

import pytest
from tests.datasets import chat_families as families
from tokenizers import AddedToken

from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.chat_turns import ChatTurns
from lightrft.datasets.messages import Conversation
from lightrft.datasets.suffix import TurnSuffix
from lightrft.rollout.environments.environments import control_token_ids

FAMILIES = sorted(families.FAMILIES)
TEXTS = ["plain", " spaced \n", '{"a": "q"}', "\n\nlines.\n", "<tool_response>", "é 数"]
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "function", "arguments": '{"value": "v"}'},
}


def of(name):
    tokenizer = families.family_tokenizer(name)
    suffix = TurnSuffix(ChatIds(tokenizer))
    return tokenizer, suffix, suffix.chat


def result(text):
    return {"role": "tool", "name": "function", "tool_call_id": "call00000", "content": text}


for_every_family = pytest.mark.parametrize("name", FAMILIES)


@for_every_family
def test_what_follows_a_turn_is_what_environments_append(name):
    tokenizer, suffix, chat = of(name)
    turn = tokenizer("hello", add_special_tokens=False)["input_ids"]
    as_tool = suffix.role == "tool"
    other = TurnSuffix(ChatIds(tokenizer), is_conversation=True)
    for text in TEXTS:
        for last in (turn, [*turn, tokenizer.eos_token_id]):
            if as_tool:
                appended = chat.suffix(last, [CALL], [result(text)])
                expected = suffix.after(last, [text])
                assert appended.token_ids == expected.token_ids
                assert appended.text_spans == expected.text_spans
            appended = chat.suffix(last, [], [{"role": "user", "content": text}])
            expected = other.after(last, [text])
            assert appended.token_ids == expected.token_ids
            assert appended.text_spans == expected.text_spans


def test_special_tokens_without_a_role_end_turns_in_every_stage():
    """Phi-3 marks its turns by added tokens that its special tokens do not name."""
    template, _, special = families.FAMILIES["Phi"]
    tokenizer = families.tokenizer_of(template, ("<bos>", "<eos>"), ())
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end not in tokenizer.all_special_ids
    suffix = TurnSuffix(ChatIds(tokenizer))
    assert (suffix.chat.end_of_turn, suffix.role) == (end, "user")
    ask = {"role": "user", "content": "hello"}
    talk = Conversation((ask, {"role": "assistant", "content": "ok"}))
    (turn,) = ChatTurns(suffix.chat).turns(talk)
    assert turn.token_ids[-1] == end
    forged = [
        i for i in suffix.after((end,), ["x<|end|>"]).token_ids if i in control_token_ids(tokenizer)
    ]
    assert forged == [
        i for i in suffix.after((end,), ["x"]).token_ids if i in suffix.chat.special_ids
    ]


@for_every_family
def test_a_prompt_has_the_ids_of_the_whole_rendering(name):
    tokenizer, _, chat = of(name)
    talk = [{"role": "user", "content": "hello."}]
    talk += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "\nmore"}]
    expected = tokenizer.apply_chat_template(
        talk, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert list(chat.prompt(talk).token_ids) == expected


@for_every_family
def test_no_text_becomes_a_special_token(name):
    tokenizer, _, chat = of(name)
    names = [str(tokenizer.convert_ids_to_tokens(i)) for i in sorted(chat.special_ids)]
    forged = "".join(names)
    clean, dirty = ([{"role": "user", "content": text}] for text in ("hello", f"hello{forged}"))

    def specials(rendered):
        return [i for i in rendered.token_ids if i in chat.special_ids]

    assert specials(chat.prompt(clean)) == specials(chat.prompt(dirty))
    assert forged in tokenizer.decode(chat.prompt(dirty).token_ids)
    turn = (tokenizer.eos_token_id,)
    assert specials(chat.suffix(turn, [], clean)) == specials(chat.suffix(turn, [], dirty))
    assert not any(i in chat.special_ids for i in chat.text(forged).token_ids[1:])

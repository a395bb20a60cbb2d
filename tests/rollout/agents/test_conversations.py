"""What calls cost and how they are numbered: work and memory linear in a history."""

import pytest
from tests.datasets import chat_families as families
from tests.rollout.agents.endpoint_desk import TALK, answer, completed

from lightrft.datasets.chat_ids import ChatIds
from lightrft.rollout.agents import conversations as conversations_module
from lightrft.rollout.agents.conversations import Conversations
from lightrft.rollout.agents.messages import read_chat
from lightrft.rollout.agents.rendering_check import fault_of

TOKENIZER = families.family_tokenizer("Qwen2.5")
END = TOKENIZER.eos_token_id


def conversations():
    return Conversations(ChatIds(TOKENIZER), 7)


def ask(talk, messages, **options):
    """Asks, and answers by a word."""
    body = {"model": "policy", "messages": messages, **options}
    return answer(talk, talk.ask(read_chat(body)))


def number(**options):
    return ask(conversations(), TALK, **options)[0].request_id


def test_a_conversation_may_be_deeper_than_the_stack():
    talk = conversations()
    (turn,) = ask(talk, TALK)
    for count in range(1500):
        turn = ask_after(talk, turn, count)
    (row,) = talk.branches()
    assert len(row) == 1501
    assert len(row[-1].context) == sum(
        len(each.before.token_ids) + len(each.sampled.output_token_ids) for each in row[:-1]
    ) + len(row[-1].before.token_ids)


def ask_after(talk, parent, count):
    """A turn as `ask` makes it, without the rendering of its history."""
    body = {"model": "policy", "messages": [{"role": "user", "content": f"{count}"}]}
    (turn,) = talk.ask(read_chat(body))
    turn.parent = parent
    ids = (5, END)
    turn.completion = completed(turn.request_id, (), ids)
    turn.is_delivered = True
    talk.answered([turn])
    return turn


@pytest.mark.parametrize("text", ["Go on.", " and more \n", "x<|im_end|>y"])
def test_messages_are_rendered_so_often_however_many_there_are(text, monkeypatch):
    times = []
    own = TOKENIZER.apply_chat_template
    monkeypatch.setattr(
        TOKENIZER,
        "apply_chat_template",
        lambda *given, **options: (times.append(1), own(*given, **options))[1],
    )

    def renderings(count):
        talk, more = conversations(), [{"role": "user", "content": text}] * count
        first = ask(talk, TALK)[0]
        times.clear()
        (turn,) = ask(talk, [*TALK, {"role": "assistant", "content": "Yes."}, *more])
        assert turn.parent is first
        assert not fault_of([first, turn], talk.chat)
        ask(talk, [{"role": "user", "content": text}] * count)
        return len(times)

    renderings(1)  # some renderings try the template
    assert renderings(2) == renderings(40)


def test_equal_messages_and_tools_are_kept_once():
    talk, messages, sizes = conversations(), [*TALK], []
    tools = [{"type": "function", "function": {"name": "add", "description": "x" * 500}}]
    for count in range(20):
        turn = ask(talk, messages, tools=tools)[0]
        more = {"role": "user", "content": f"{count}" + "y" * 1000}
        messages = [*messages, {"role": "assistant", "content": "Yes."}, more]
        sizes.append(talk.kept_bytes)
    first, last = talk.turns[0].call, turn.call
    assert last.messages[0] is first.messages[0]
    assert last.tools is first.tools
    assert sizes[19] - sizes[10] < 1.2 * (sizes[10] - sizes[1])


def test_calls_that_differ_are_numbered_whichever_comes_first():
    talk = conversations()
    asked = [{}, {"max_tokens": 5}, {"seed": 1}, {"seed": 2}, {"n": 2}, {"stop": "x"}, {}]
    numbers = [ask(talk, TALK, **options)[0].request_id for options in asked]
    assert len(set(numbers)) == len(asked)
    assert numbers[1:6] == [number(**options) for options in asked[1:6]]
    assert numbers[0] == number()

    def rows(asked):
        talk, said = conversations(), [*TALK, {"role": "assistant", "content": "Yes."}]
        for options in asked:
            ask(talk, TALK, **options)
        for options in asked:
            ask(talk, [*said, {"role": "user", "content": f"{options}"}])
        return [[turn.request_id for turn in row] for row in talk.branches()]

    assert rows(asked) == rows(asked[3:] + asked[:3])


def test_the_memory_of_an_episode_is_bounded(desk, monkeypatch):
    monkeypatch.setattr(conversations_module, "MAX_KEPT_BYTES", 10_000)
    talks = ([{"role": "user", "content": f"{count} " * 20}] for count in range(40))
    codes = [desk.post(messages=talk) for talk in talks]
    assert codes[0].status_code == 200
    assert codes[-1].status_code == 413
    assert codes[-1].json()["error"]["code"] == "episode_too_large"

"""The real Anthropic client, unchanged, against the endpoint; and what the endpoint refuses."""

import pytest
from tests.rollout.agents.endpoint_desk import CALL, TALK

anthropic = pytest.importorskip("anthropic", reason="needs the package anthropic")

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
ASKED = {"model": "policy", "messages": TALK, "max_tokens": 90}


@pytest.fixture
def client(desk):
    address = desk.endpoint.server.address
    return anthropic.Anthropic(base_url=address, api_key=desk.key, max_retries=0)


def test_conversations_go_on_with_the_ids_that_were_sampled(desk, client):
    desk.says = "Hi."
    talk = [*TALK]
    for number in range(3):
        answer = client.messages.create(**ASKED | {"messages": talk, "system": "Be short."})
        assert [block.text for block in answer.content] == ["Hi."]
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        assert answer.usage.input_tokens > answer.usage.output_tokens > 0
        talk += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [{"type": "text", "text": f"More {number}"}]},
        ]
    (row,) = desk.episode.talk.branches()
    assert len(row) == 3


def test_one_conversation_over_both_protocols_is_one_branch(desk, client):
    desk.says = "Hi."
    client.messages.create(**ASKED)
    history = [*TALK, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go"}]
    assert desk.post(messages=history).status_code == 200
    (row,) = desk.episode.talk.branches()
    assert len(row) == 2


def test_results_of_tools_continue_their_call(desk, client):
    desk.says = CALL
    answer = client.messages.create(**ASKED, tools=[TOOL])
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert (call.name, call.input) == ("add", {"x": 1})
    desk.says = "2"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
    talk = [
        *TALK,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    last = client.messages.create(**ASKED | {"messages": talk}, tools=[TOOL])
    assert last.content[0].text == "2"
    (row,) = desk.episode.talk.branches()
    assert len(row) == 2
    assert "So?" in desk.tokenizer.decode(row[-1].context)


@pytest.mark.parametrize(("says", "tools"), [("Hi there.", []), (CALL, [TOOL])])
def test_streams_join_to_the_whole_answer(desk, client, says, tools):
    desk.says = says
    with client.messages.stream(**ASKED, tools=tools) as stream:
        told = stream.get_final_message()
    desk.says = "other"
    again = desk.post(dict(ASKED, tools=tools), path="/v1/messages").json()
    assert again["content"] != []
    found = [block.text if block.type == "text" else block.input for block in told.content]
    assert found == [says if not tools else {"x": 1}]
    assert told.usage.output_tokens > 1
    assert told.stop_reason == ("tool_use" if tools else "end_turn")


def test_ends_have_their_reasons(desk, client):
    answer = client.messages.create(**ASKED, stop_sequences=["more", "STOP"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert answer.content[0].text == "Well said. "
    cut = client.messages.create(**ASKED | {"max_tokens": 2})
    assert cut.stop_reason == "max_tokens"


def test_a_wrong_key_is_refused(desk):
    wrong = anthropic.Anthropic(
        base_url=desk.endpoint.server.address, api_key="sk-wrong", max_retries=0
    )
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**ASKED)

"""OpenAI's protocol of responses by the real client; and what the endpoint refuses of it."""

import pytest
from tests.rollout.agents.endpoint_desk import CALL, TALK

openai = pytest.importorskip("openai", reason="needs the package openai")

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture
def client(desk):
    return openai.OpenAI(base_url=desk.endpoint.base_url, api_key=desk.key, max_retries=0)


def test_conversations_go_on_with_the_ids_that_were_sampled(desk, client):
    desk.says = "Hi."
    talk = [*TALK]
    for number in range(3):
        answer = client.responses.create(model="policy", input=talk, instructions="Be short.")
        assert (answer.output_text, answer.status) == ("Hi.", "completed")
        assert answer.usage.total_tokens > answer.usage.output_tokens > 0
        talk += [*answer.output, {"role": "user", "content": f"More {number}"}]
        talk = [item if isinstance(item, dict) else sent(item) for item in talk]
    (row,) = desk.episode.talk.branches()
    assert len(row) == 3


def sent(item):
    """An item as a client sends it again; marks of parts that are empty are left out."""
    found = item.model_dump(exclude_none=True)
    for part in found.get("content", []):
        part.pop("annotations", None)
        part.pop("logprobs", None)
    return found


def test_results_of_tools_continue_their_call(desk, client):
    desk.says = CALL
    answer = client.responses.create(model="policy", input="Hello", tools=[TOOL])
    (call,) = answer.output
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"x": 1}')
    desk.says = "2"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    talk = [*TALK, sent(call), result]
    last = client.responses.create(model="policy", input=talk, tools=[TOOL])
    assert last.output_text == "2"
    (row,) = desk.episode.talk.branches()
    assert len(row) == 2


@pytest.mark.parametrize(("says", "tools"), [("Hi there.", []), (CALL, [TOOL])])
def test_streams_join_to_the_whole_answer(desk, client, says, tools):
    desk.says = says
    with client.responses.stream(model="policy", input="Hello", tools=tools) as stream:
        told = stream.get_final_response()
    if tools:
        assert told.output[0].arguments == '{"x": 1}'
    else:
        assert told.output_text == says
    assert told.usage.output_tokens > 1


def test_an_answer_that_was_cut_is_incomplete(desk, client):
    answer = client.responses.create(model="policy", input="Hello", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"

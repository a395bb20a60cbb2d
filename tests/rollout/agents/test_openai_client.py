"""The real OpenAI client, unchanged, against the endpoint."""

import pytest
from tests.rollout.agents.endpoint_desk import CALL, TALK

openai = pytest.importorskip("openai", reason="needs the package openai")


@pytest.fixture
def client(desk):
    return openai.OpenAI(base_url=desk.endpoint.base_url, api_key=desk.key, max_retries=0)


def test_chats_go_on(desk, client):
    desk.says = "Hi."
    talk = [*TALK]
    for number in range(3):
        answer = client.chat.completions.create(model="policy", messages=talk, logprobs=True)
        assert answer.choices[0].message.content == "Hi."
        assert answer.choices[0].logprobs.content[0].logprob == -0.5
        assert answer.usage.total_tokens > 0
        talk += [answer.choices[0].message, {"role": "user", "content": f"More {number}"}]
    (row,) = desk.episode.talk.branches()
    assert len(row) == 3


def test_streams(desk, client):
    desk.says = "Hi."
    told = client.chat.completions.create(
        model="policy", messages=TALK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(told)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hi."
    assert chunks[-1].usage.completion_tokens > 0
    assert len(desk.episode.talk.branches()) == 1


def test_tools(desk, client):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    desk.says = CALL
    answer = client.chat.completions.create(model="policy", messages=TALK, tools=tools)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"x": 1}')
    desk.says = "2"
    talk = [*TALK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    told = client.chat.completions.create(model="policy", messages=talk, tools=tools, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == "2"
    (row,) = desk.episode.talk.branches()
    assert len(row) == 2


def test_other_calls(desk, client):
    assert [model.id for model in client.models.list()] == ["policy"]
    desk.says = "time"
    text = client.completions.create(model="policy", prompt="Once upon a", n=2)
    assert [choice.text for choice in text.choices] == ["time", "time"]
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            model="policy", messages=TALK, response_format={"type": "json_object"}
        )
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-none").models.list()
    desk.endpoint.close_key(desk.key)
    with pytest.raises(openai.ConflictError, match="is over"):
        client.models.list()

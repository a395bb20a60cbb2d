"""The real clients of three protocols, unchanged, against the endpoint."""

import pytest
from tests.rollout.agents.endpoint_desk import CALL, TALK

openai = pytest.importorskip("openai", reason="needs the package openai")
anthropic = pytest.importorskip("anthropic", reason="needs the package anthropic")

SCHEMA = {"name": "add", "parameters": {"type": "object"}}
CALLED = [("add", {"x": 1})]


class Chats:
    """OpenAI's protocol of chats.

    Attributes:
        tools: One, as the protocol has it.
    """

    tools = [{"type": "function", "function": SCHEMA}]

    def __init__(self, desk):
        options = {"base_url": desk.endpoint.base_url, "api_key": desk.key, "max_retries": 0}
        self.client = openai.OpenAI(**options)

    def ask(self, talk, **options):
        """An answer, its text, its calls, and what stands for it in a conversation."""
        answer = self.client.chat.completions.create(model="policy", messages=talk, **options)
        message = answer.choices[0].message
        calls = [(c.function.name, eval(c.function.arguments)) for c in message.tool_calls or []]
        return answer, message.content, calls, [message]

    def stream(self, talk, **options):
        """Text and calls of a stream, and the number of tokens."""
        options["stream_options"] = {"include_usage": True}
        asked = self.client.chat.completions.create(
            model="policy", messages=talk, stream=True, **options
        )
        *chunks, last = asked
        deltas = [chunk.choices[0].delta for chunk in chunks]
        parts = [call.function for delta in deltas for call in delta.tool_calls or []]
        read = [[part.name for part in parts], [part.arguments for part in parts]]
        name, arguments = ("".join(filter(None, each)) for each in read)
        calls = [(name, eval(arguments))] if parts else []
        return "".join(d.content or "" for d in deltas), calls, last.usage.completion_tokens

    def result(self, answer):
        """The result of its call."""
        (call,) = answer.choices[0].message.tool_calls
        return {"role": "tool", "tool_call_id": call.id, "content": "2"}


class Messages(Chats):
    """Anthropic's protocol."""

    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA["parameters"]}]

    def __init__(self, desk):
        address = desk.endpoint.server.address
        self.client = anthropic.Anthropic(base_url=address, api_key=desk.key, max_retries=0)

    def read(self, answer):
        calls = [(part.name, part.input) for part in answer.content if part.type == "tool_use"]
        return "".join(part.text for part in answer.content if part.type == "text"), calls

    def ask(self, talk, **options):
        options = {"model": "policy", "messages": talk, "max_tokens": 90, **options}
        answer = self.client.messages.create(**options)
        turn = {"role": "assistant", "content": answer.content}
        return answer, *self.read(answer), [turn]

    def stream(self, talk, **options):
        options = {"model": "policy", "messages": talk, "max_tokens": 90, **options}
        with self.client.messages.stream(**options) as stream:
            answer = stream.get_final_message()
        return *self.read(answer), answer.usage.output_tokens

    def result(self, answer):
        (call,) = answer.content
        part = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
        return {"role": "user", "content": [part, {"type": "text", "text": "So?"}]}


class Responses(Chats):
    """OpenAI's protocol of responses."""

    tools = [{"type": "function", "strict": False, **SCHEMA}]

    def read(self, answer):
        calls = [(c.name, eval(c.arguments)) for c in answer.output if c.type == "function_call"]
        return answer.output_text, calls

    def ask(self, talk, **options):
        answer = self.client.responses.create(model="policy", input=talk, **options)
        return answer, *self.read(answer), list(map(sent, answer.output))

    def stream(self, talk, **options):
        with self.client.responses.stream(model="policy", input=talk, **options) as stream:
            said = [event.text for event in stream if event.type == "response.output_text.done"]
            answer = stream.get_final_response()
        assert "".join(said) == answer.output_text
        return *self.read(answer), answer.usage.output_tokens

    def result(self, answer):
        (call,) = answer.output
        return {"type": "function_call_output", "call_id": call.call_id, "output": "2"}


def sent(item):
    """An item as a client sends it again; marks of parts that are empty are left out."""
    found = item.model_dump(exclude_none=True)
    for part in found.get("content", []):
        part.pop("annotations", None)
        part.pop("logprobs", None)
    return found


@pytest.fixture(params=[Chats, Messages, Responses])
def client(request, desk):
    return request.param(desk)


def test_conversations_go_on_with_the_ids_that_were_sampled(desk, client):
    desk.says = "Hi."
    talk = [*TALK]
    for number in range(3):
        answer, text, calls, turn = client.ask(talk)
        assert (text, calls) == ("Hi.", [])
        usage = answer.usage.model_dump()
        assert all(usage[name] > 0 for name in usage if name in ("input_tokens", "prompt_tokens"))
        talk += [*turn, {"role": "user", "content": f"More {number}"}]
    (row,) = desk.episode.talk.branches()
    assert len(row) == 3


def test_results_of_tools_continue_their_call(desk, client):
    desk.says = CALL
    answer, _, calls, turn = client.ask(TALK, tools=client.tools)
    assert calls == CALLED
    desk.says = "2"
    talk = [*TALK, *turn, client.result(answer)]
    assert client.ask(talk, tools=client.tools)[1] == "2"
    (row,) = desk.episode.talk.branches()
    assert len(row) == 2
    assert ("So?" in desk.tokenizer.decode(row[-1].context)) == isinstance(client, Messages)


def test_streams_join_to_the_whole_answer(desk, client):
    desk.says = "Hi there."
    text, calls, num_tokens = client.stream(TALK)
    assert (text, calls) == ("Hi there.", [])
    assert num_tokens > 1
    desk.says = CALL
    assert client.stream(TALK, tools=client.tools)[1] == CALLED
    assert len(desk.episode.talk.branches()) == 2


def test_one_conversation_over_two_protocols_is_one_branch(desk):
    desk.says = "Hi."
    Messages(desk).ask(TALK)
    history = [*TALK, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go"}]
    assert desk.post(messages=history).status_code == 200
    (row,) = desk.episode.talk.branches()
    assert len(row) == 2


def test_ends_have_their_reasons(desk):
    messages, responses, chats = Messages(desk), Responses(desk), Chats(desk)
    answer, text, *_ = messages.ask(TALK, stop_sequences=["more", "STOP"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert text == "Well said. "
    assert messages.ask(TALK, max_tokens=2)[0].stop_reason == "max_tokens"
    cut, *_ = responses.ask("Hello", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    desk.says = "Hi."
    answer = messages.ask([{"role": "user", "content": "Hey"}], system="Be short.")[0]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert responses.ask("Hey", instructions="Be short.")[0].status == "completed"
    assert chats.ask(TALK, logprobs=True)[0].choices[0].logprobs.content[0].logprob == -0.5
    desk.says = CALL
    assert messages.ask(TALK, tools=messages.tools)[0].stop_reason == "tool_use"
    assert chats.ask(TALK, tools=chats.tools)[0].choices[0].finish_reason == "tool_calls"


def test_other_calls(desk):
    client = Chats(desk).client
    assert [model.id for model in client.models.list()] == ["policy"]
    desk.says = "time"
    text = client.completions.create(model="policy", prompt="Once upon a", n=2)
    assert [choice.text for choice in text.choices] == ["time", "time"]
    with pytest.raises(openai.BadRequestError, match="response_format"):
        Chats(desk).ask(TALK, response_format={"type": "json_object"})
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-none").models.list()
    with pytest.raises(anthropic.AuthenticationError):
        Messages(desk).client.with_options(api_key="sk-none").messages.create(
            model="policy", messages=TALK, max_tokens=9
        )
    desk.endpoint.close_key(desk.key)
    with pytest.raises(openai.ConflictError, match="is over"):
        client.models.list()

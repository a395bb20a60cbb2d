"""OpenEnv servers whose actions are calls of MCP tools: each is a tool of the model."""

import json
import threading

import pytest
from tests.rollout.stages import answers_of, call
from tests.rollout.test_adapters import Server

from lightrft.rewards.worker import ReportedError
from lightrft.tools.environments.openenv import ActionRefusedError, connect

ACTION = {
    "type": "object",
    "description": "Call a tool.",
    "properties": {
        "metadata": {"type": "object"},
        "type": {"const": "call_tool", "type": "string"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["tool_name"],
}
TOOLS = [
    {
        "name": "look_up",
        "description": "Look a word up.",
        "input_schema": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "limit": {"type": "integer", "default": 3}},
            "required": ["word"],
        },
    },
    {
        "name": "answer",
        "description": "",
        "inputSchema": {"properties": {"n": {"type": "integer"}}},
    },
]


class ToolServer(Server):
    """A server as OpenEnv's `MCPEnvironment` makes it.

    Args:
        lists: Whether it has tools.
        counts: Calls of tools count as steps.
    """

    def __init__(self, lists=True, counts=True, tools=TOOLS):
        super().__init__()
        self.schema, self.lists, self.counts, self.tools = {"action": ACTION}, lists, counts, tools

    def observed(self, state, asked):
        data = asked["data"]
        if asked["type"] == "reset":
            state |= {"episode_id": data["episode_id"], "target": data["target"]}
            return {"type": "observation", "data": {"observation": {}, "reward": 0.0}}
        if asked["type"] == "mcp":
            return self.listed(data)
        state["step_count"] += self.counts
        is_right = data["arguments"].get("n") == state["target"]
        told = {"tool_name": data["tool_name"], **self.result(data)}
        is_done = is_right or data["arguments"].get("word") == "last"
        given = {"reward": 1.0 if is_right else -0.25, "done": is_done}
        return {"type": "observation", "data": {"observation": told, **given}}

    def listed(self, request):
        assert request["method"] == "tools/list"
        if self.lists:
            reply = {"result": {"tools": self.tools}}
        else:
            reply = {"error": {"code": -32603, "message": "Environment does not support MCP"}}
        return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": request["id"], **reply}}

    def result(self, data):
        word = data["arguments"].get("word")
        if word in ("fail", "last"):
            return {"result": None, "error": {"error_type": "execution_error", "message": "no net"}}
        if word == "image":
            return {"result": [{"type": "image", "image": "/etc/hostname"}], "error": None}
        text = {"type": "text", "text": f"of {word}"}
        value = None if word == "text" else {"found": word}
        return {"result": {"content": [text, text], "data": value, "is_error": False}}


@pytest.fixture
def serve():
    running = []

    def make(*given, **options):
        running.append(ToolServer(*given, **options))
        return running[-1]

    yield make
    for each in running:
        each.server.shutdown()
        each.thread.join(10.0)


def opened(server):
    return connect(server.url)


def names_of(server):
    return [each["function"]["name"] for each in opened(server).schemas()]


def test_each_tool_is_shown_and_called_by_its_name(stage, serve):
    server = serve()
    turns = [
        call("look_up", word="plum") + call("look_up", word="fail"),
        call("look_up", word=3) + call("answer", n=1),
        call("answer", n=7),
        "never said",
    ]
    played = stage(turns, environment=server.name)
    assert played.environments.specs.tool_names == ("answer", "look_up")
    rollouts, rewards = played.sample()
    text = rollouts[0].prompt.text
    assert '"name": "look_up", "description": "Look a word up."' in text
    assert '"required": ["word"]' in text
    assert '"name": "step"' not in text
    told = answers_of(rollouts[0])
    assert told[0] == ['{"found": "plum"}', '{"error": "ActionRefusedError: no net"}']
    assert "word" in told[1][0]  # refused by its schema, before the server
    assert json.loads(told[1][1]) == {"found": None}
    assert len(told) == 3
    # Each call that reached the server is paid where its turn ends.
    assert rollouts[0].conversation.turn_rewards == [-0.5, -0.25, 1.0]
    assert rewards[0].reward == 0.25
    asked = server.sessions[-1]["asked"][2]
    assert asked["data"]["type"] == "call_tool"


def test_a_tool_that_fails_may_end_the_episode(stage, serve):
    server = serve()
    turns = [call("look_up", word="last"), "never said"]
    rollouts, rewards = stage(turns, environment=server.name).sample()
    [[answer]] = rollouts[0].conversation.answers
    assert (answer.outcome, answer.ends_episode) == ("error", True)
    assert rewards[0].reward == -0.25


def test_a_server_is_asked_for_its_tools(serve):
    shown = opened(serve()).schemas()
    assert [each["function"]["name"] for each in shown] == ["look_up", "answer"]
    assert shown[1]["function"]["description"]
    assert shown[1]["function"]["parameters"]["type"] == "object"


def test_actions_of_other_servers_stay_one_tool(serve):
    server = serve(lists=False)
    assert names_of(server) == ["step"]
    server.schema = {"action": {"properties": {"number": {"type": "integer"}}}}
    server.lists = True
    assert names_of(server) == ["step"]
    # A server that names no fields may have tools all the same.
    server.schema = {"action": {"properties": {"metadata": {}}}}
    assert len(opened(server).schemas()) == 2


def test_a_tool_that_cannot_be_called_is_refused_by_name(serve):
    for name in ("reset", "get_reward", "step", "tools", "_hidden", ""):
        with pytest.raises(ReportedError, match=f"the name '{name}', by which it cannot be called"):
            opened(serve(tools=[{"name": name, "input_schema": {}}])).schemas()


def test_a_full_server_is_asked_again_for_its_tools(serve, monkeypatch):
    server = serve()
    server.room = threading.Semaphore(0)
    monkeypatch.setattr("lightrft.tools.environments.openenv.CONNECT_SECONDS", 0.5)
    with pytest.raises(ReportedError, match=r"its tools are not known: .*Server at capacity"):
        opened(server).schemas()
    monkeypatch.undo()
    timer = threading.Timer(0.3, server.room.release)
    timer.start()
    assert len(opened(server).schemas()) == 2
    timer.join()


def test_results_are_text_whatever_they_are(serve):
    episode = opened(serve())()
    episode.reset(target=7, input="x")
    assert episode.look_up(word="text") == "of text\nof text"
    # No path of a server is opened here.
    assert episode.look_up(word="image") == '[{"type": "image", "image": "/etc/hostname"}]'
    with pytest.raises(ActionRefusedError, match="no net"):
        episode.look_up(word="fail")
    assert episode.get_reward() == -0.75


def test_a_server_need_not_count_the_calls_of_tools(serve):
    episode = opened(serve(counts=False))()
    episode.reset(target=7, input="x")
    episode.answer(n=1)
    episode.answer(n=7)
    assert episode.is_done
    assert episode.get_reward() == 0.75

"""Agents of the real smolagents, unchanged, against the endpoint."""

from dataclasses import replace

import pytest
from tests.rollout.agents.endpoint_desk import Desk
from tests.rollout.stages import call

smolagents = pytest.importorskip("smolagents", reason="needs the package smolagents")


class ScriptedDesk(Desk):
    """Says one text after another."""

    def __init__(self):
        self.texts = []
        super().__init__()
        # The prompts of smolagents have some thousand letters.
        self.rules = replace(self.rules, max_tokens=100_000)

    def sample(self, params, requests):
        if requests:
            self.says = self.texts.pop(0)
        return super().sample(params, requests)


@pytest.fixture
def desk():
    made = ScriptedDesk()
    yield made
    made.close()


@pytest.fixture
def model(desk):
    # By default smolagents asks for a call in every answer, which no sampling can promise.
    return smolagents.OpenAIModel(
        "policy", api_base=desk.endpoint.base_url, api_key=desk.key, tool_choice="auto"
    )


tool = smolagents.tool


@tool
def add(x: int, y: int) -> int:
    """Adds.

    Args:
        x: One number.
        y: Another number.
    """
    return x + y


def trained(desk):
    """Every answer is in one row."""
    rows = desk.episode.talk.branches()
    turns = [turn for row in rows for turn in row]
    assert len(turns) == len(set(turns)) == len(desk.asked)
    for (_, request), turn in zip(desk.asked, sorted(turns, key=lambda t: t.order), strict=True):
        assert turn.context == request.prompt_token_ids
    return rows


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_calls_tools(desk, model, stream):
    desk.texts = [call("add", x=40, y=2), call("final_answer", answer=42)]
    agent = smolagents.ToolCallingAgent(
        [add], model, max_steps=3, verbosity_level=-1, stream_outputs=stream
    )
    assert agent.run("What is 40 + 2?") == 42
    assert "42" in desk.tokenizer.decode(desk.asked[-1][1].prompt_token_ids)
    # It tells calls in words of its own, so that each step is a history of its own.
    assert [len(row) for row in trained(desk)] == [1, 1]


def test_an_agent_that_writes_code(desk, model):
    desk.texts = ["I add.\n<code>\nprint(add(40, 2))\n</code>", "<code>\nfinal_answer(42)\n</code>"]
    agent = smolagents.CodeAgent([add], model, max_steps=3, verbosity_level=-1)
    assert agent.run("What is 40 + 2?") == 42
    assert "</code>" in desk.asked[0][0].stop
    assert len(trained(desk)) == 2

"""The same task as an environment and through the endpoint: the ids are the same, step by step."""

import pytest
from tests.datasets import chat_families as families
from tests.rollout.agents.agent_stage import AgentStage
from tests.rollout.stages import Stage, call

from lightrft.tools.quickstart.task import examples_folder, load_example

FOLDER = examples_folder()
CALCULATOR = load_example("calculator.py:CALCULATOR")
ENVIRONMENT = f"{FOLDER}/calculator_environment.py:Calculator"
AGENT = f"{FOLDER}/calculator_agent.py:run"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TURNS = [call("calculate", expression="12*12"), "\\boxed{144}"]


def said(tokenizer, request):
    """What a deterministic policy says next: it follows from the ids before it alone."""
    return TURNS[tokenizer.decode(request.prompt_token_ids).count("<|assistant|>") - 1]


def steps(rollouts):
    """Of each row the ids of its prompt, and behind it ids with their mask."""
    made = [each.completion for each in rollouts]
    return [(c.prompt_token_ids, c.output_token_ids, c.is_sampled) for c in made]


@pytest.mark.full
def test_an_environment_and_an_agent_show_the_same_ids(tmp_path, monkeypatch):
    special = ("<bos>", "<eos>", *ROLES)
    family = CALCULATOR.template, ("<bos>", "<eos>", "<eos>"), special
    monkeypatch.setitem(families.FAMILIES, "Qwen2.5", family)
    rows = [{"input": "What is 12*12?"}]
    (tmp_path / "environment").mkdir()
    environment = Stage(
        tmp_path / "environment", TURNS, rows=rows, environment=ENVIRONMENT, max_turns=3
    )
    environment.said = lambda request: said(environment.tokenizer, request)
    played, _ = environment.sample()
    agent = AgentStage(
        tmp_path,
        AGENT,
        rows=rows,
        script=lambda request: said(agent.tokenizer, request),
        reward_fn=(f"{FOLDER}/boxed_sum.py:score",),
    )
    try:
        called = [item.rollout for item in agent.sample().scored]
    finally:
        agent.close()
    assert len(played) == len(called) == 2
    assert steps(played) == steps(called)
    environment.said = lambda request: call("calculate", expression="12*13")
    other, _ = environment.sample()
    assert steps(other) != steps(called)
    text = environment.tokenizer.decode(played[0].token_ids)
    assert text.count("<|assistant|>") == 2
    assert "<|tool|>144<|assistant|>" in text

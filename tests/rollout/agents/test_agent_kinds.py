"""Agents of other makes: how they are spelled, and the refusals where their package is missing."""

from importlib.util import find_spec

import pytest
from tests.rollout.agents.agent_stage import AgentStage

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.files import read_rows
from lightrft.datasets.types import DataError
from lightrft.tools.agents.verifiers_tasks import read_source

without_verifiers = pytest.mark.skipif(
    find_spec("verifiers") is not None, reason="verifiers is installed"
)


def test_options_of_verifiers_are_paths():
    text = "verifiers:a?taskset.num-tasks=3&agent.harness.id=null&agent.model=m%2Cn&select.limit=2"
    source = read_source(text)
    assert source.name == "a"
    assert source.options == {
        "taskset": {"num_tasks": 3},
        "agent": {"harness": {"id": "null"}, "model": "m,n"},
    }
    assert source.select == {"limit": 2}


@pytest.mark.parametrize(
    "text, told",
    [
        ("verifiers:", "expected verifiers:NAME"),
        ("verifiers:a?b", "expected verifiers:NAME"),
        ("verifiers:a?b=1&b.c=2", "b.c lies below an option that has a value itself"),
        ("verifiers:a?select=1", "give select.limit"),
    ],
)
def test_sources_that_are_spelled_wrongly(text, told):
    with pytest.raises(DataError, match=told):
        read_source(text)


@pytest.mark.full
@without_verifiers
def test_verifiers_is_needed(tmp_path):
    with pytest.raises(DataError, match=r"verifiers:a: needs verifiers 0.4 \(uv pip install"):
        read_rows("verifiers:a")
    with pytest.raises(ConfigError, match=r"agent verifiers:a: needs verifiers 0\.4"):
        AgentStage(tmp_path, "verifiers:a")


def test_an_agent_of_no_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"agent other:a\.b: expected FILE\.py:NAME.*verifiers:"):
        AgentStage(tmp_path, "other:a.b")


@pytest.mark.parametrize("agent, count", [("verifiers:a", 0), ("a.py:b", 1)])
def test_the_sandbox_acts_with_kinds_of_agents(agent, count):
    config = TrainConfig(agent=agent, apply_chat_template=True, sandbox="unsafe")
    assert (
        len([text for text in config.unused_options() if text.startswith("sandbox acts only")])
        == count
    )

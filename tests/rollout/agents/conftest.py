"""Stages and endpoints of agents, which end with their test."""

import pytest
from tests.rollout.agents.agent_stage import AgentStage
from tests.rollout.agents.endpoint_desk import Desk


@pytest.fixture
def stage(tmp_path):
    """A function of an agent and options; see `AgentStage`."""
    made = []

    def make(agent, **options):
        made.append(AgentStage(tmp_path, agent, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def desk_with():
    """A function of the limits of a desk."""
    made = []

    def make(**limits):
        made.append(Desk(**limits))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def desk(desk_with):
    return desk_with(
        max_header_bytes=4096, max_body_bytes=20_000, read_seconds=2.0, max_connections=64
    )

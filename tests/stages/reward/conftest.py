"""Pairs for runs of reward models."""

import pytest
from tests.runs import write
from tests.stages.reward.reward_world import pairs


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", pairs(24))

"""A tiny model and pairs for runs of reward models."""

from __future__ import annotations

import pytest
from tests.runs import write
from tests.stages.reward.reward_world import pairs

from lightrft.tools.model_presets import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "model"
    write_tiny_model(path, "tiny-qwen3", seed=1)
    return str(path)


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", pairs(24))

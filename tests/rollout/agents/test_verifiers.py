"""The agent of the documentation that plays a task of the real verifiers.

Its harness installs what it needs by uv: it takes a package index, and is not run by default.
"""

import re
from pathlib import Path

import pytest
from tests.machine import seconds
from tests.rollout.agents.agent_stage import AgentStage
from tests.rollout.agents.test_agents import check_exact

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
pytestmark = [pytest.mark.slow, pytest.mark.shard("verifiers"), pytest.mark.timeout(1200)]


def test_a_task_is_played_and_pays(tmp_path):
    pytest.importorskip("verifiers", reason="needs scripts/verifiers.txt")
    (text,) = re.findall(r"```python\n# sum_task\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "sum_task.py"
    file.write_text(text)
    played = AgentStage(
        tmp_path,
        f"{file}:run",
        agent_timeout_seconds=seconds(300),
        rows=[{"input": f"What is 40 + {i}?", "target": 40 + i} for i in (2, 3)],
        script=lambda request: "It is 42.",
    )
    try:
        samples = played.sample()
        assert [item.reward for item in samples.scored] == [1.0, 1.0, 0.0, 0.0]
        assert len(check_exact(played, samples)) == 4
        prompt = samples.scored[0].rollout.completion.prompt_token_ids
        assert "What is 40 + 2?" in played.tokenizer.decode(prompt)
    finally:
        played.close()

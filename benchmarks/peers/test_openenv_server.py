"""An episode on OpenEnv's own server."""

import pytest
from tests.rollout.stages import Stage, call, close_pools

pytestmark = [pytest.mark.slow, pytest.mark.shard("verifiers")]


def test_a_real_openenv_server(tmp_path, openenv_server):
    calls = [call("step", number=number) for number in (1, 13, "x", 7)]
    played = Stage(tmp_path, [*calls, "never said"], environment=f"openenv:http://{openenv_server}")
    try:
        rollouts, rewards = played.sample()
    finally:
        close_pools()
    # The server counts the step that raised.
    assert "unlucky" in played.text(rollouts[0])
    assert [reward.reward for reward in rewards] == [1.0, 1.0]
    assert '{"text": "wrong"}' in played.text(rollouts[0])
    assert 'Find it.\n{"text": "guess"}<|im_end|>' in rollouts[0].prompt.text

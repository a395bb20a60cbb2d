"""Many steps with the real vLLM on a CPU: nothing grows."""

import pytest

pytestmark = pytest.mark.shard("soak_vllm")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3500)
def test_two_hundred_steps_hold_no_more_than_the_first_hundred(soak, too_steep):
    assert too_steep(soak("vllm", 200)) == {}

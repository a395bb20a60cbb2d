"""Progress of a run in checkpoints: what earlier versions wrote is read."""

import pytest

from lightrft.config import TrainConfig
from lightrft.run.loop import BestModel, LoopState, read_client_state
from lightrft.stages.policy.maker import PolicyMemory

# As commit 3191490 wrote it, after two steps with `reward_running_norm` and `best_metric`.
WRITTEN = {
    "num_steps": 2,
    "num_requests": 8,
    "episode": 1,
    "consumed_samples": 4,
    "kl_coef": 0.0503,
    "carry": '{"groups": [], "num_calls": 0, "weights_version": -1, "entries": []}',
    "best": [0.5, 1],
    "reward_moments": [32, 0.25, 1.5],
}


def memory():
    return PolicyMemory.initial(TrainConfig(init_kl_coef=0.05, reward_running_norm=True))


def test_a_client_state_of_before_is_read_and_written_alike():
    state, remembered = read_client_state(WRITTEN, memory())
    assert state == LoopState(2, 1, 4, BestModel(0.5, 1))
    assert (remembered.num_requests, remembered.kl.coef) == (8, 0.0503)
    assert (remembered.moments.count, remembered.moments.mean) == (32, 0.25)
    again = {**state.to_client_state(), **remembered.to_client_state()}
    assert (again.pop("weights_version"), again.pop("num_undecided")) == (-1, 0)
    assert again.keys() == WRITTEN.keys()
    assert {**again, "carry": ""} == {**WRITTEN, "carry": ""}
    assert read_client_state(again, memory()) == (state, remembered)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_client_state_without_a_part_is_refused_in_one_line(name):
    rest = {key: value for key, value in WRITTEN.items() if key != name}
    with pytest.raises(ValueError, match=f"no trainer state: '{name}' is missing") as caught:
        read_client_state(rest, memory())
    assert len(str(caught.value).splitlines()) == 1


def test_a_number_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="expected a number"):
        read_client_state({**WRITTEN, "kl_coef": "much"}, memory())

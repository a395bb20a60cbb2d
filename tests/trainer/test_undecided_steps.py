"""Steps of which the reward decides no sample: nothing is trained, and the third one is an end."""

import pytest
from tests.runs import TextReward

from lightrft.reporting.alarms import run_verdict
from lightrft.rewards.types import RewardError, RewardResult


class Unsure(TextReward):
    """Decides the calls of some steps only."""

    def __init__(self, decided_steps=(), calls_a_step=1):
        self.decided, self.size, self.calls = decided_steps, calls_a_step, 0

    def score(self, prompts, responses, labels, columns):
        step = self.calls // self.size
        self.calls += 1
        if step not in self.decided:
            return [None] * len(responses)
        return [RewardResult(float(i % 2)) for i in range(len(responses))]


@pytest.mark.parametrize(
    "options",
    [
        {"advantage_estimator": "group_norm"},
        {"advantage_estimator": "reinforce++", "reward_running_norm": True},
        {"advantage_estimator": "gae"},
        {"advantage_estimator": "remax"},
        {"dynamic_sampling": True, "max_num_gen_batches": 2},
        {"off_policy_correction": "tis"},
    ],
    ids=str,
)
def test_a_step_without_any_decision_changes_nothing_and_the_run_goes_on(
    build_world, capsys, options
):
    world = build_world(
        reward=Unsure(),
        num_prompts=16,
        max_steps=2,
        with_critic=options.get("advantage_estimator") == "gae",
        with_reference=True,
        **options,
    )
    before = world.weights()
    metrics = world.trainer.fit().last_metrics
    assert world.trainer.state.num_steps == 2
    shares = ("undecided_steps", "undecided_share", "masked_share")
    assert [metrics[name] for name in shares] == [1, 1, 1]
    assert world.is_unmoved(before)
    assert "no update in step 2: the reward decided no sample" in capsys.readouterr().out
    assert run_verdict([metrics]) == "no update: 1 of 1 steps: the reward decided no sample"


def test_the_third_step_in_a_row_without_any_decision_ends_the_run(build_world):
    calls = 4  # groups of a step
    world = build_world(
        reward=Unsure((2,), calls), num_prompts=32, max_steps=8, advantage_estimator="group_norm"
    )
    with pytest.raises(RewardError, match="no sample of 3 steps in a row"):
        world.trainer.fit()
    assert world.trainer.state.num_steps == 5
    assert world.trainer.stage.memory.num_undecided == 2


def test_the_count_is_part_of_a_checkpoint():
    from lightrft.config import TrainConfig
    from lightrft.stages.policy.maker import PolicyMemory

    memory = PolicyMemory.initial(TrainConfig())
    saved = memory.to_client_state() | {"num_undecided": 2}
    assert memory.restored(saved).num_undecided == 2
    del saved["num_undecided"]
    assert memory.restored(saved).num_undecided == 0

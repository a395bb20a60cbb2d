"""Groups without signal are dropped by unshaped accuracy, and refilled."""

import numpy as np
from tests.update_inputs import sample_table

from lightrft.config import TrainConfig
from lightrft.rollout.dynamic import apply_selection, mixed_groups, select_groups
from lightrft.rollout.sampler import GreedySource, training_params
from lightrft.rollout.source import SampleRequests, Samples
from lightrft.stages.policy.step_metrics import group_metrics


def table(groups, *, rewards=None, masked=()):
    """Two-token rows; `groups` holds the accuracies of each group."""
    accuracies = [accuracy for group in groups for accuracy in group]
    return sample_table(
        [1] * len(accuracies),
        prompt_length=1,
        group_ids=np.array([g for g, group in enumerate(groups) for _ in group]),
        rewards=accuracies if rewards is None else rewards,
        accuracies=np.array(accuracies, dtype=np.float64),
        is_masked=np.isin(np.arange(len(accuracies)), masked),
    )


def test_a_group_is_mixed_by_accuracy_not_by_shaped_reward():
    shaped = table([(1, 1), (0, 1), (0, 0)], rewards=[1.0, 0.4, 0.0, 1.0, 0.0, -0.5])
    assert mixed_groups(shaped) == [1]


def test_accuracies_that_differ_by_rounding_alone_make_no_group_mixed():
    samples = table([(0.1 + 0.2, 0.3), (0, 0.3)])
    assert mixed_groups(samples) == [1]
    assert select_groups(samples, 1).num_solved == 1
    assert group_metrics(samples)["constant_group_share"] == 0.5


def test_rows_whose_reward_failed_do_not_make_a_group_mixed():
    assert mixed_groups(table([(0, 1), (0, 1)], masked=[1])) == [1]


def test_the_first_mixed_groups_are_taken_and_the_rest_is_counted():
    samples = table([(0, 0), (0, 1), (1, 1), (1, 0), (0, 1)])
    found = select_groups(samples, 2)
    assert found.rows.tolist() == [2, 3, 6, 7]
    assert not found.is_filler.any()
    assert (found.num_groups, found.num_constant, found.num_surplus, found.num_solved) == (
        5,
        2,
        1,
        1,
    )


def test_constant_groups_fill_up_outside_the_loss():
    samples = table([(0, 0), (0, 1), (1, 1)])
    taken = apply_selection(samples, select_groups(samples, 2))
    assert taken.group_ids.tolist() == [0, 0, 1, 1]
    assert taken.is_masked.tolist() == [True, True, False, False]


def test_nothing_to_learn_from_is_known():
    samples = table([(0, 0), (1, 1)])
    found = select_groups(samples, 1)
    assert found.is_empty
    assert apply_selection(samples, found).is_masked.all()
    assert not select_groups(table([(0, 1), (1, 1)]), 2).is_empty


def test_a_step_whose_rewards_all_failed_has_no_mixed_group():
    samples = table([(0, 1), (1, 1)], masked=range(4))
    found = select_groups(samples, 1)
    assert found.is_empty
    assert found.num_solved == 0


def test_a_group_whose_greedy_baseline_failed_is_excluded():
    samples, greedy = table([(0, 1), (1, 0)]), table([(1,), (0,)], masked=[1])

    class Scripted:
        def sample(self, requests):
            is_greedy = requests.params.temperature == 0
            return Samples((), greedy if is_greedy else samples, 2)

    config = TrainConfig(n_samples_per_prompt=2)
    requests = SampleRequests((), range(0), 2, training_params(config))
    found = GreedySource(Scripted(), config).sample(requests)
    assert found.table.is_masked.tolist() == [False, False, True, True]
    # Dynamic sampling puts another prompt in its place.
    assert mixed_groups(found.table) == [0]
    assert samples.is_masked.tolist() == [False] * 4

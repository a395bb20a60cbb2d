import math
from types import SimpleNamespace

import numpy as np
import pytest
from tests.engines.fake_engine import FakeEngine
from tests.update_inputs import sample_table

from lightrft.config import TrainConfig
from lightrft.engines.types import EngineConfig
from lightrft.records.rollout import AnsweredCall, ResponseTurns
from lightrft.rewards.types import RewardError
from lightrft.rollout.source import AGENT_COUNTS, Samples
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.policy_stage import evaluate_prompts
from lightrft.stages.policy.step_metrics import conversation_means, rollout_means, table_metrics
from lightrft.strategy import get_fake_strategy
from lightrft.tools.evaluation.evaluation_run import EvalSettings, summarise


def table(rewards, group_ids, lengths, *, masked=(), truncated=(), components=None):
    names, numbers = tuple(components or ()), np.arange(len(rewards))
    return sample_table(
        lengths,
        rewards=rewards,
        group_ids=np.array(group_ids),
        component_names=names,
        components=np.reshape([*(components or {}).values()], (len(names), len(rewards))).T,
        is_truncated=np.isin(numbers, truncated),
        is_masked=np.isin(numbers, masked),
    )


def test_rewards_lengths_shares_and_the_spread_within_groups():
    metrics = table_metrics(
        table(
            [1.0, 0.0, 0.5, 0.5],
            [0, 0, 1, 1],
            [4, 2, 6, 0],
            truncated=[2],
            components={"format": [1.0, np.nan, 0.0, 0.5], "none": [np.nan] * 4},
        )
    )
    assert metrics["reward"] == 0.5
    assert metrics["reward_std"] == pytest.approx(np.std([1, 0, 0.5, 0.5]))
    assert metrics["group_reward_std"] == pytest.approx(0.25)
    assert (metrics["reward_min"], metrics["reward_max"]) == (0.0, 1.0)
    assert (metrics["response_length"], metrics["response_length_max"]) == (3.0, 6.0)
    assert metrics["truncated_share"] == 0.25
    assert metrics["constant_group_share"] == 0.5
    assert metrics["reward/format"] == 0.5
    assert "reward/none" not in metrics


def test_excluded_rows_are_counted_and_left_out():
    metrics = table_metrics(table([1.0, 99.0], [0, 0], [2, 50], masked=[1]))
    assert metrics["reward_max"] == 1.0
    assert metrics["response_length_max"] == 2
    assert metrics["masked_share"] == 0.5
    assert metrics["undecided_share"] == 0.0
    shares = {"num_samples", "masked_share", "undecided_share"}
    assert set(table_metrics(table([1.0], [0], [1], masked=[0]))) == shares


def test_undecided_rows_are_counted_apart():
    flags = {"undecided": [1.0, np.nan, np.nan, np.nan]}
    metrics = table_metrics(table([0.0] * 4, [0] * 4, [1] * 4, masked=[0, 1], components=flags))
    assert (metrics["masked_share"], metrics["undecided_share"]) == (0.5, 0.25)
    assert "reward/undecided" not in metrics


def test_an_evaluation_leaves_undecided_rows_out_of_its_means_and_counts_them():
    flags = {"right": [np.nan, 1.0, 1.0, 0.0], "undecided": [1.0, np.nan, np.nan, np.nan]}
    rows = table([0.0, 1.0, 1.0, 0.0], range(4), [1] * 4, masked=[0], components=flags)
    sampler = SimpleNamespace(sample_all=lambda prompts, params: ([], rows))
    metrics = evaluate_prompts(["p"] * 4, sampler, TrainConfig())
    assert metrics["eval/reward"] == metrics["eval/right"] == pytest.approx(2 / 3)
    assert metrics["eval/masked_share"] == 0.25
    assert "eval/undecided" not in metrics
    # `lightrft eval`: not right, and out of the mean rewards.
    metrics = summarise("greedy", rows, EvalSettings(threshold=0.0), 1)
    assert metrics["greedy/accuracy"] == 0.75
    assert metrics["greedy/reward"] == metrics["greedy/component/right"] == pytest.approx(2 / 3)
    assert metrics["greedy/masked_share"] == 0.25
    assert "greedy/component/undecided" not in metrics
    decided = rows.take(np.arange(1, 4))
    assert "greedy/masked_share" not in summarise("greedy", decided, EvalSettings(), 1)


def test_an_evaluation_of_undecided_rows_alone_has_no_mean_and_one_of_failed_rows_is_an_error():
    def evaluation(**components):
        rows = table([0.0] * 2, range(2), [3, 5], masked=[0, 1], components=components)
        sampler = SimpleNamespace(sample_all=lambda prompts, params: ([], rows))
        return evaluate_prompts(["p"] * 2, sampler, TrainConfig())

    metrics = evaluation(undecided=[1.0, 1.0])
    assert math.isnan(metrics["eval/reward"])
    assert (metrics["eval/masked_share"], metrics["eval/response_length"]) == (1.0, 4.0)
    with pytest.raises(RewardError, match="failed for every prompt of the evaluation"):
        evaluation()


def test_constant_groups_are_told_by_equality_not_by_rounding():
    equal = table([0.7] * 8, [0] * 8, [1] * 8)
    different = table([0.7, 0.7 + 1e-12], [0, 0], [1, 1])
    assert table_metrics(equal)["constant_group_share"] == 1.0
    assert table_metrics(different)["constant_group_share"] == 0.0


def test_turns_and_calls_of_each_tool_are_counted():
    def call(name, outcome, seconds=0.0):
        return AnsweredCall(name, {}, outcome, "", seconds)

    answers = (
        ((call("add", "ok", 2.0), call("add", "error", 4.0)), (call("", "malformed"),)),
        ((call("add", "ok", 0.0), call("look", "refused")),),
        (),
    )
    talks = [ResponseTurns(("said",) * (len(own) + 1), own, len(own)) for own in answers]
    scored = [
        SimpleNamespace(rollout=SimpleNamespace(conversation=talk), is_masked=i == 1)
        for i, talk in enumerate(talks)
    ]
    metrics = StepMetrics()
    for mean in conversation_means(scored, ("add", "look")):
        metrics.add_mean(*mean)
    found = metrics.reduce(get_fake_strategy().context)
    assert found == pytest.approx(
        {
            "episode/turns": 6 / 3,
            "episode/calls": 3 / 3,
            "episode/malformed_calls": 1 / 3,
            "episode/refused_calls": 1 / 3,
            "episode/restarts": 3 / 3,
            "episode/failed_share": 1 / 3,
            "tool/add/calls": 3 / 3,
            "tool/add/error_share": 1 / 3,
            "tool/add/seconds": 6 / 3,
            "tool/look/calls": 0.0,  # nothing is said of calls that were not made
        }
    )


def scripted_world(build_world, tiny_model, responses):
    """A trainer whose engine says what the test wants: tokens by request and sample."""
    world = build_world(generate_max_len=4)
    actor = world.actor.model
    engine = FakeEngine(
        EngineConfig("fake", tiny_model, options={"vocab_size": 300, "eos_token_id": 257}),
        script=lambda request, index: (responses[(request.request_id * 4 + index) % 5], None),
        parameters=dict(actor.named_parameters()),
    )
    world.strategy.inference_engine = engine
    world.strategy.update_engine_weights(world.trainer.actor)
    return world


def test_tokens_of_the_engine_are_the_tokens_that_are_trained_on(build_world, tiny_model):
    end, pad = 257, 256
    responses = [(97, 98, end), (97, 98, 99, 100), (97, end, 98, 99), (pad, pad, end), (end,)]
    world = scripted_world(build_world, tiny_model, responses)
    batch = world.trainer.make_experience()
    rollouts = batch.rollouts
    for row, sample_id in enumerate(rollouts.sample_ids.tolist()):
        sampled = rollouts.token_ids[row][rollouts.response_mask[row]].tolist()
        assert tuple(sampled) == responses[sample_id % 5]
    metrics = world.trainer.ppo_train()
    truncated = [len(responses[i % 5]) == 4 for i in range(16)]
    assert metrics["truncated_share"] == pytest.approx(sum(truncated) / 16)
    assert metrics["logprob_diff_max"] > 0.1  # the scripted engine's law is another: it shows


def test_an_engine_that_says_nothing_trains_nothing_and_breaks_nothing(build_world, tiny_model):
    world = scripted_world(build_world, tiny_model, [()] * 5)
    before = world.weights()
    metrics = world.step()
    assert metrics["policy_loss"] == 0.0
    assert metrics["response_length"] == 0.0
    assert world.is_unmoved(before)


def test_repeated_runs_of_tokens():
    from lightrft.stages.policy.step_metrics import repeated_share

    assert repeated_share([1, 2, 3, 4, 5, 6]) == 0
    assert repeated_share([7] * 6) == pytest.approx(2 / 3)  # three windows, one of them new
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_share([1, 2]) == 0


def test_a_rank_without_episodes_of_agents_has_the_names_of_the_others():
    none, one = (
        Samples((), table([1.0], [0], [2]), 1, agent_counts=counts)
        for counts in ((), (dict.fromkeys(AGENT_COUNTS, 3),))
    )
    names = [name for name, _, _ in rollout_means(none)]
    assert set(names) == {name for name, _, _ in rollout_means(one)}
    assert all(count == 0 for _, _, count in rollout_means(none))

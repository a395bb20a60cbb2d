"""Unfinished responses go on in the next step; every token keeps the law that sampled it."""

from collections import Counter

import numpy as np
import pytest
import torch
from tests.models.batches import relative_norm
from tests.runs import TextReward

from lightrft.config import TrainConfig
from lightrft.stages.policy.maker import ExperienceMaker
from lightrft.strategy.config import ConfigError

STREAM = {
    "stream_chunk": 3,
    "stream_prompts": 6,
    "max_staleness": 2,
    "generate_max_len": 12,
    "parity_check_steps": 0,
}


def world_of(build_world, args=None, **keywords):
    world = build_world(args={**STREAM, **(args or {})}, num_prompts=16, **keywords)
    world.end_early()
    return world


def letters():
    """Return a reward that is one for all of some groups."""
    return TextReward(lambda text: sum(map(ord, text)) % 2)


CASES = {
    "plain": {},
    "dynamic": {"dynamic_sampling": True, "n_samples_per_prompt": 2, "train_batch_size": 8},
    "fire": {"use_fire": True, "first_token_temperature": 1.5},
    "lag": {"rollout_lag": 1},
    "small chunks": {"stream_chunk": 1},
    "lag alone": {"rollout_lag": 2, "stream_chunk": None, "stream_prompts": None},
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_every_token_has_the_logprob_and_version_of_the_weights_that_sampled_it(build_world, case):
    world = world_of(build_world, CASES[case], reward=letters())
    lag, bound = CASES[case].get("rollout_lag", 0), 2
    versions, ages, asked = {}, [], []
    for _ in range(4):
        version = world.strategy.inference_engine.weights_version
        versions[version] = world.state_dict()
        experience, metrics = world.sample(), world.train()
        table = experience.rows
        ages += (version - table.token_versions).tolist()
        ends = np.cumsum(table.response_lengths)
        for row in range(0, len(table), 3):
            first = ends[row] - table.response_lengths[row]
            for place in (0, int(table.response_lengths[row]) - 1):
                if place == 0 and case == "fire":  # drawn at another temperature
                    continue
                found = float(table.rollout_logprobs[first + place])
                weights = versions[int(table.token_versions[first + place])]
                expected = world.logprobs_under(weights, table, row)[place]
                assert found == pytest.approx(expected, abs=2e-5)
        # Whole responses only: finished by a stop or at the limit.
        assert (table.response_lengths[table.is_truncated] == 12).all()
        asked += [item.rollout.completion.request_id for item in experience.samples.scored]
        assert metrics["staleness/max"] <= bound + lag
        if "logprob_diff_max" in metrics:
            assert metrics["logprob_diff_max"] < 1e-4
    size = 2 if case == "dynamic" else 4
    assert all(asked.count(each) == size for each in asked)
    assert {0, 1} <= set(ages) <= set(range(bound + lag + 1))


@pytest.mark.cover(len(CASES))
@pytest.mark.parametrize("case", CASES)
def test_a_run_continues_with_what_was_open(build_world, goes_on_exactly, case):
    half = goes_on_exactly(
        lambda **more: world_of(build_world, CASES[case], reward=letters(), **more)
    )
    flight = half.trainer.stage.memory.in_flight
    assert flight.held if case == "lag alone" else any(each.begun for each in flight.stream.groups)


@pytest.mark.parametrize("args", [{}, {"rollout_lag": 1}, {"stream_prompts": 10}])
def test_the_lengths_trained_in_a_run_are_those_sampled_in_it(build_world, monkeypatch, args):
    """As a multiset: no group is left out at the end, where those that are open are long."""
    world = world_of(build_world, {**args, "num_episodes": 2, "max_steps": 6})
    engine, make = world.strategy.inference_engine, ExperienceMaker.make
    sampled, trained, generate = Counter(), [], engine.generate

    def counting(requests, params, **named):
        found = generate(requests, params, **named)
        for part in found:
            sampled[part.request_id] += len(part.output_token_ids)
        return found

    def noting(*given):
        batch = make(*given)
        trained.extend(batch.experience.rows.response_lengths.tolist())
        return batch

    engine.generate = counting
    monkeypatch.setattr(ExperienceMaker, "make", noting)
    assert world.trainer.fit().num_steps == 6
    assert len(trained) == 6 * 16
    assert sorted(trained) == sorted(sampled.values())
    assert len(set(trained)) > 4
    left = world.trainer.stage.memory.in_flight
    assert (left.stream.groups, left.stream.num_groups, left.held) == ((), 0, ())
    assert left.num_requests == 6 * 4


@pytest.mark.parametrize(
    "options, says",
    [
        ({"agent": "a.py:run", "apply_chat_template": True}, "stream_chunk excludes agent"),
        ({"stop": ("x",)}, "stop: a text may begin"),
        ({"stream_prompts": 2561}, "max_staleness"),
        ({"stream_prompts": 511}, "stream_prompts must lie between"),
        ({"max_staleness": 0}, "max_staleness"),
        ({"stream_chunk": 0}, "stream_chunk"),
        ({"rollout_lag": -1}, "rollout_lag"),
    ],
)
def test_what_excludes_streaming_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        TrainConfig(**{"stream_chunk": 8, **options})


def test_old_logprobs_of_the_engine_save_a_pass_and_change_nothing(build_world):
    asked = build_world(args={"use_rollout_logprobs": True, "train_batch_size": 16})
    plain = build_world(args={"train_batch_size": 16}, max_epochs=2)
    two = build_world(args={"use_rollout_logprobs": True, "train_batch_size": 16}, max_epochs=2)
    calls = []
    actor = asked.strategy.unwrap_model(asked.trainer.actor)
    actor.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    maker = asked.trainer.stage.maker
    maker.config = maker.config.replaced({"parity_check_steps": -1})
    batch = asked.trainer.make_experience()
    assert calls == []
    mask = batch.rollouts.response_mask
    assert torch.equal(batch.outputs.old_logprobs[mask], batch.rollouts.rollout_logprobs[mask])
    for world in (plain, two):
        world.step()
    # The engine's logprobs are the trainer's up to rounding.
    assert relative_norm(two.weights(), plain.weights()) < 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.9},
        {"top_k": 5, "truncated_logprobs": "all"},
        {"use_fire": True},
        {"off_policy_correction": "tis"},
        {"high_entropy_token_ratio": 0.2},
    ],
)
def test_old_logprobs_of_the_engine_need_its_law_and_no_forward_pass(options):
    with pytest.raises(ConfigError, match=r"use_rollout_logprobs (excludes|with top_p)"):
        TrainConfig(use_rollout_logprobs=True, **options)

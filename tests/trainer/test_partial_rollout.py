"""Unfinished responses go on in the next step; every token keeps the law that sampled it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightrft.config import TrainConfig
from lightrft.rollout.source import PartialRolloutState
from lightrft.strategy.config import ConfigError

PARTIAL = {
    "partial_rollout": True,
    "partial_rollout_prompts": 6,
    "partial_rollout_tokens": 3,
    "max_staleness": 2,
    "generate_max_len": 12,
    "parity_check_steps": 0,
}


class EndsEarly:
    """An engine whose responses end at chance, early for some and late for others."""

    def __init__(self, strategy, end_ids):
        engine = strategy.inference_engine
        self.generate = engine.generate
        engine.generate = self
        self.end_ids = end_ids

    def __call__(self, requests, params, **keywords):
        from dataclasses import replace

        ends = replace(params, stop_token_ids=tuple(self.end_ids))
        return self.generate(requests, ends, **keywords)


def world_of(build_world, args=None, **keywords):
    world = build_world(args={**PARTIAL, **(args or {})}, num_prompts=16, **keywords)
    # A third of the vocabulary ends a response, so lengths vary from 1 to the limit.
    EndsEarly(world.strategy, range(0, 256, 10))
    return world


def snapshot(world):
    from copy import deepcopy

    return deepcopy(world.strategy.unwrap_model(world.trainer.actor).state_dict())


def reference_logprob(world, weights, token_ids, position):
    """Of one token under the weights of one version, by a forward pass over what precedes it."""
    from lightrft.models import Actor

    actor = Actor.from_pretrained(world.strategy.config.pretrain)
    actor.load_state_dict(weights)
    prefix = torch.tensor([token_ids[:position]])
    with torch.no_grad():
        logits = actor.model(input_ids=prefix).logits[0, -1]
    return float(logits.log_softmax(-1)[token_ids[position]])


def test_every_token_has_the_logprob_and_version_of_the_weights_that_sampled_it(build_world):
    world = world_of(build_world)
    trainer = world.trainer
    versions, ages, sampled, trained, carried = {}, [], 0, 0, 0
    for step in range(4):
        version = world.strategy.inference_engine.weights_version
        versions[version] = snapshot(world)
        trainer.make_experience()
        experience = trainer.pending[1].experience
        table, report = experience.rows, experience.samples.partial
        assert report.version == version
        assert len(table) == 16
        ages += (version - table.token_versions).tolist()
        stops = np.cumsum(table.lengths)
        ends = np.cumsum(table.response_lengths)
        for row in range(0, len(table), 3):
            tokens = table.token_ids[stops[row] - table.lengths[row] : stops[row]].tolist()
            first = ends[row] - table.response_lengths[row]
            for place in (0, int(table.response_lengths[row]) - 1):
                found = float(table.rollout_logprobs[first + place])
                weights = versions[int(table.token_versions[first + place])]
                position = int(table.prompt_lengths[row]) + place
                expected = reference_logprob(world, weights, tokens, position)
                assert found == pytest.approx(expected, abs=2e-5)
        # Whole responses only: finished by a stop or at the limit.
        assert (table.response_lengths[table.is_truncated] == 12).all()
        trained += int(table.response_lengths.sum())
        metrics = trainer.ppo_train(step + 1)
        sampled += metrics["partial/sampled_tokens"]
        carried = metrics["partial/carried_tokens"]
        share = float((version > table.token_versions).mean())
        assert metrics["partial/stale_token_share"] == pytest.approx(share)
        assert metrics["logprob_diff_max"] < 1e-4
    assert sampled == trained + carried
    assert {0, 1} <= set(ages) <= {0, 1, 2}


def test_a_run_continues_with_what_was_carried(build_world, tmp_path):
    def run(num_steps, world):
        for _ in range(num_steps):
            world.trainer.make_experience()
            world.trainer.ppo_train(world.trainer.state.num_steps + 1)
        return world

    whole = run(4, world_of(build_world))
    half = run(2, world_of(build_world, ckpt_path=str(tmp_path / "ckpt")))
    half.trainer.save_checkpoint()
    assert any(group.oldest_version is not None for group in half.trainer.stage.memory.carry.groups)
    again = world_of(build_world, ckpt_path=str(tmp_path / "ckpt"))
    assert again.trainer.load_checkpoint()
    groups = zip(
        half.trainer.stage.memory.carry.groups, again.trainer.stage.memory.carry.groups, strict=True
    )
    assert all(a.prompt == b.prompt for a, b in groups)
    run(2, again)
    expected = whole.weights()
    for name, value in again.weights().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    mine, theirs = again.trainer.stage.memory.carry, whole.trainer.stage.memory.carry
    assert [g.request_id for g in mine.groups] == [g.request_id for g in theirs.groups]
    assert [[s.token_ids for s in g.samples] for g in mine.groups] == [
        [s.token_ids for s in g.samples] for g in theirs.groups
    ]


def test_carried_responses_survive_json_and_another_count_of_versions(build_world):
    import json

    world = world_of(build_world)
    world.trainer.make_experience()
    world.trainer.ppo_train(1)
    carry = world.trainer.stage.memory.carry
    assert PartialRolloutState.from_json(json.loads(json.dumps(carry.to_json()))) == carry
    shifted = carry.rebased(carry.weights_version + 1 + 5)
    assert shifted.groups[0].oldest_version == carry.groups[0].oldest_version + 5
    assert shifted.rebased(carry.weights_version + 1) == carry
    with pytest.raises(ValueError, match="cannot be read"):
        PartialRolloutState.from_json({"groups": [{}], "num_calls": 0, "weights_version": 0})


@pytest.mark.parametrize(
    "options",
    [
        {"dynamic_sampling": True},
        {"use_fire": True},
        {"partial_rollout_prompts": 1025},
        {"partial_rollout_prompts": 511},
        {"max_staleness": 0},
    ],
)
def test_what_excludes_partial_rollouts_is_refused(options):
    with pytest.raises(ConfigError, match=r"partial_rollout|max_staleness"):
        TrainConfig(partial_rollout=True, **options)


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
        world.trainer.make_experience()
        world.trainer.ppo_train(1)
    expected = plain.weights()
    moved = sum(float((v - expected[n]).norm() ** 2) for n, v in two.weights().items()) ** 0.5
    whole = sum(float(v.norm() ** 2) for v in expected.values()) ** 0.5
    # The engine's logprobs are the trainer's up to rounding.
    assert moved < 1e-3 * whole


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.9},
        {"top_k": 5},
        {"use_fire": True},
        {"off_policy_correction": "tis"},
        {"high_entropy_token_ratio": 0.2},
    ],
)
def test_old_logprobs_of_the_engine_need_its_law_and_no_forward_pass(options):
    with pytest.raises(ConfigError, match="use_rollout_logprobs excludes"):
        TrainConfig(use_rollout_logprobs=True, **options)

"""Samples of a truncated law: the trainer replays what the engine excluded."""

import dataclasses
import json

import pytest
import torch
from tests.engines.altered_engines import ShiftedEngine, plant

from lightrft.config import TrainConfig
from lightrft.engines.types import SamplingParams
from lightrft.models.support import SamplingSupport
from lightrft.records.recorded import replayed_support
from lightrft.reporting.trajectories import TrajectoryLog
from lightrft.rollout.ledger_records import LedgerError
from lightrft.stages.parity_limits import ParityError
from lightrft.stages.policy.algorithm import check_algorithm, decide
from lightrft.strategy.config import ConfigError
from lightrft.tools.report.sample_page import token_sample

TRUNCATIONS = [
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.2},
    {"top_p": 0.7, "top_k": 40, "min_p": 0.05, "temperature": 0.8},
]


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
def test_engine_and_trainer_agree_under_the_truncated_law(build_world, caplog, options):
    caplog.set_level("INFO")
    world = build_world(
        off_policy_correction="tis", correction_high=10.0, truncated_logprobs="all", **options
    )
    batch = world.trainer.make_experience()
    mask, outputs = batch.rollouts.compared_mask, batch.outputs
    assert torch.equal(mask, batch.rollouts.response_mask)
    engine = batch.rollouts.rollout_logprobs[mask]
    torch.testing.assert_close(outputs.sampling_logprobs[mask], engine, rtol=0, atol=1e-5)
    assert (outputs.old_logprobs[mask] - engine).abs().max() > 1e-2
    assert f"parity: engine and trainer logprobs of {int(mask.sum())} tokens" in caplog.text
    metrics = world.trainer.ppo_train(1)
    assert metrics["logprob_diff_max"] < 1e-5
    assert metrics["correction_weight"] == pytest.approx(1, abs=1e-4)
    assert metrics["correction_raw_weight_max"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("options", [{"use_fire": True}, {"stream_chunk": 2}], ids=str)
def test_other_ways_to_sample_are_compared_too(build_world, options):
    world = build_world(top_p=0.7, num_prompts=16, **options)
    for step in (1, 2):
        mask = world.trainer.make_experience().rollouts.compared_mask
        assert mask.any()
        assert world.trainer.ppo_train(step)["logprob_diff_max"] < 1e-4


def test_the_trajectories_and_their_page_compare_under_one_law(build_world, tmp_path):
    log = TrajectoryLog(tmp_path / "trajectories.jsonl")
    world = build_world(top_p=0.8, trajectory_log=log, truncated_logprobs="all")
    world.step()
    log.close()
    line = json.loads((tmp_path / "trajectories.jsonl").read_text().splitlines()[0])
    assert min(line["log_kept_mass"]) < -1e-2
    assert token_sample(line)["ratio"] == pytest.approx([1.0] * len(line["tokens"]), abs=1e-4)
    del line["log_kept_mass"]
    assert min(token_sample(line)["ratio"]) < 0.99


def test_the_loss_does_not_see_the_truncation(build_world):
    """Without a correction a step is the same whether or not the kept mass is known."""
    worlds = []
    for is_known in (True, False):
        world = build_world(top_p=0.5, truncated_logprobs="all")
        batch = world.trainer.make_experience()
        if not is_known:
            rollouts = dataclasses.replace(batch.rollouts, compared_mask=None, support=None)
            outputs = dataclasses.replace(batch.outputs, log_kept_mass=None)
            step, drawn = world.trainer.pending
            blind = dataclasses.replace(batch, rollouts=rollouts, outputs=outputs)
            experience = dataclasses.replace(drawn.experience, batch=blind)
            world.trainer.pending = step, dataclasses.replace(drawn, experience=experience)
        world.train()
        worlds.append(world)
    assert worlds[0].is_unmoved(worlds[1].weights())


@pytest.mark.parametrize(
    "options", [{}, {"train_batch_size": 16}], ids=["forward-first", "forward-deferred"]
)
def test_a_planted_fault_trips_the_gate(build_world, options):
    # The ledger's gate, which comes first, would find it too.
    world = build_world(top_p=0.8, ledger_gate=False, **options)
    world.strategy.config.verify_weight_sync = False
    plant(world.strategy, world.trainer.actor, ShiftedEngine)
    with pytest.raises(ParityError, match=r"5\.00e-01 in the mean"):
        world.step()


def test_a_wrong_support_trips_the_gate(build_world, monkeypatch):
    monkeypatch.setattr(
        "lightrft.experience.delivery.replayed_support", lambda *_: SamplingSupport(top_p=0.6)
    )
    with pytest.raises(LedgerError, match="top_p, top_k and min_p differ"):
        build_world(top_p=0.8).trainer.make_experience()
    with pytest.raises(ParityError):
        build_world(top_p=0.8, ledger_gate=False).trainer.make_experience()


def check(engine, **options):
    config, algorithm = decide(TrainConfig(**options))
    check_algorithm(config, algorithm, has_critic=False, has_reference=False, engine_type=engine)


def test_engines_with_another_order_are_not_replayed(build_world, monkeypatch):
    both, one = SamplingParams(top_k=5, top_p=0.9), SamplingParams(top_p=0.9)
    assert replayed_support(SamplingParams(), "hf") is None
    assert replayed_support(SamplingParams(temperature=0, top_p=0.9), "hf") is None
    assert replayed_support(one, "sglang") == SamplingSupport(top_p=0.9)
    assert replayed_support(both, "sglang") is None
    for name in ("hf", "vllm"):
        assert replayed_support(both, name) == SamplingSupport(top_k=5, top_p=0.9)
        support = replayed_support(SamplingParams(top_k=5, min_p=0.1), name)
        assert support == SamplingSupport(top_k=5, min_p=0.1, min_p_first=name == "vllm")
    check("sglang", top_k=5, top_p=0.9)
    check("sglang", top_p=0.9, off_policy_correction="tis")
    check("hf", top_k=5, top_p=0.9, off_policy_correction="tis")
    check("vllm", top_k=5, top_p=0.9, off_policy_correction="tis")
    with pytest.raises(ConfigError, match="min_p: the sglang engine cannot draw by a seed"):
        check("sglang", min_p=0.1)
    check("vllm", top_k=5, min_p=0.1, off_policy_correction="tis")
    with pytest.raises(
        ConfigError, match="the sglang engine kept with top_p, top_k and min_p together"
    ):
        check("sglang", top_k=5, top_p=0.9, off_policy_correction="tis")
    monkeypatch.setattr("lightrft.experience.delivery.replayed_support", lambda *_: None)
    world = build_world(top_p=0.5)
    assert world.trainer.make_experience().outputs.log_kept_mass is None
    assert "logprob_diff_max" not in world.trainer.ppo_train()


def test_what_cannot_be_replayed_is_refused_with_remedies():
    TrainConfig(off_policy_correction="tis", top_p=0.9, top_k=5)
    with pytest.raises(ConfigError, match="leave them out, or use_fire, or the correction"):
        TrainConfig(off_policy_correction="tis", top_p=0.9, use_fire=True)

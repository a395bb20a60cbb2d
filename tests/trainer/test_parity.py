"""The gate that compares engine and trainer logprobs before the first update."""

import dataclasses

import pytest
import torch
from tests.engines.altered_engines import EditingEngine, ShiftedEngine, plant
from tests.engines.fake_engine import build_fake

from lightrft.cli.errors import ExitCode, exit_code_of
from lightrft.engines.factory import ENGINES
from lightrft.experience.ledger_gate import LedgerError
from lightrft.stages.parity_limits import PARITY_LIMITS, ParityError, parity_limits
from lightrft.stages.policy.parity import compare_logprobs

Q_PROJ = "model.layers.1.self_attn.q_proj"


class TransposesEngine(EditingEngine):
    """Fault: one square matrix lies in the engine with rows and columns exchanged."""

    def edit(self, piece):
        if piece.name != f"{Q_PROJ}.weight":
            return [piece]
        return [dataclasses.replace(piece, tensor=piece.tensor.view(piece.shape).T.reshape(-1))]


def faulty_world(build_world, **options):
    world = build_world(args={"verify_weight_sync": False}, **options)
    plant(world.strategy, world.trainer.actor, TransposesEngine)
    return world


@pytest.mark.parametrize("every, expected", [(0, [1]), (2, [1, 2, 4]), (-1, [])])
def test_the_comparison_follows_its_schedule(build_world, told, every, expected):
    world, compared = build_world(parity_check_steps=every, num_prompts=16), []
    for step in range(1, 5):
        told.clear()
        world.trainer.make_experience()
        if "parity: engine and trainer logprobs of " in "".join(told):
            compared.append(step)
        world.train()
    assert compared == expected


def test_a_step_of_one_batch_is_compared_by_its_only_forward(build_world, told, monkeypatch):
    monkeypatch.setattr("lightrft.stages.policy.maker.score_actor", None)
    world = build_world(parity_check_steps=1, off_policy_correction="tis", train_batch_size=16)
    for step in (1, 2):
        told.clear()
        assert world.trainer.make_experience().outputs.old_logprobs is None
        assert "parity" not in "".join(told)
        world.trainer.ppo_train(step)
        assert "parity: engine and trainer logprobs of " in "".join(told)


def test_the_comparison_changes_no_bit_of_the_step(build_world):
    one, other = (build_world(parity_check_steps=n, train_batch_size=16) for n in (-1, 1))
    one.step()
    other.step()
    assert one.is_unmoved(other.weights())


@pytest.mark.parametrize("batch_size", [8, 16], ids=["before-the-update", "before-its-step"])
def test_a_transposed_matrix_ends_the_run_and_its_layer_is_named(build_world, batch_size):
    world = faulty_world(build_world, train_batch_size=batch_size)
    before = world.weights()
    with pytest.raises(ParityError) as caught:
        world.step()
    assert world.is_unmoved(before)
    text = str(caught.value)
    assert f"outputs differ first in {Q_PROJ} " in text
    assert "worst token: sample " in text
    assert "in the mean" in text
    assert exit_code_of(caught.value) == ExitCode.VERIFICATION == 8


def test_without_the_gate_the_fault_is_seen_in_the_metrics_only(build_world):
    world = faulty_world(build_world, parity_check_steps=-1)
    metrics = world.step()
    assert metrics["logprob_diff_mean"] > PARITY_LIMITS[torch.float32].mean
    assert metrics["sequence_diff_max"] > metrics["logprob_diff_mean"]
    healthy = build_world(parity_check_steps=-1)
    assert healthy.step()["logprob_diff_mean"] < 1e-5


def test_a_wider_limit_lets_the_fault_pass(build_world):
    world = faulty_world(build_world, parity_limit=50.0)
    world.trainer.make_experience()


def test_a_fault_that_leaves_the_layers_equal_is_told_apart(build_world):
    # The ledger's gate, which comes first, would find it too.
    world = build_world(args={"verify_weight_sync": False}, ledger_gate=False)
    plant(world.strategy, world.trainer.actor, ShiftedEngine)
    with pytest.raises(ParityError, match="layers: all agree when the row is computed again"):
        world.trainer.make_experience()


def test_by_default_the_ledger_finds_it_before_anything_is_trained(build_world):
    world = build_world(args={"verify_weight_sync": False})
    plant(world.strategy, world.trainer.actor, ShiftedEngine)
    with pytest.raises(LedgerError, match=r"rollout_logprobs \(bits\) differ") as caught:
        world.trainer.make_experience()
    assert exit_code_of(caught.value) == ExitCode.VERIFICATION


def test_an_engine_that_computes_no_model_is_not_compared(build_world, told, monkeypatch):
    monkeypatch.setitem(ENGINES, "hf", build_fake)
    world = build_world()
    world.trainer.make_experience()
    assert world.trainer.check_parity() is None
    assert "parity" not in "".join(told)


def test_laws_that_cannot_be_replayed_have_nothing_to_compare(build_world, told, monkeypatch):
    monkeypatch.setattr("lightrft.experience.delivery.replayed_support", lambda *_: None)
    world = build_world(top_p=0.5)
    world.trainer.make_experience()
    assert "parity: no token whose logprobs follow the same distribution" in "".join(told)


def test_a_check_needs_samples(build_world):
    with pytest.raises(RuntimeError, match="make_experience"):
        build_world().trainer.check_parity()


def test_logprobs_that_are_not_numbers_never_pass(build_world):
    world = build_world()
    batch = world.trainer.make_experience().rollouts
    logprobs = torch.where(batch.compared_mask, float("nan"), batch.rollout_logprobs)
    report = compare_logprobs(
        batch, logprobs, limits=PARITY_LIMITS[torch.float32], context=world.strategy.context
    )
    assert not report.holds


def test_the_coarsest_dtype_sets_the_limit():
    assert parity_limits([torch.float32]).mean == 1e-4
    assert parity_limits([torch.float32, torch.bfloat16]).mean == 0.05
    assert parity_limits([torch.bfloat16, torch.int8]).mean == 0.2

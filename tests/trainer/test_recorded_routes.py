"""Runs of a mixture of experts: recorded experts are replayed, and wrong ones are found."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from tests.engines.altered_engines import RecordingEngine, planted
from tests.models.moe_types import write_moe

from lightrft.engines.hf.engine import HFEngine
from lightrft.engines.hf.routers import RoutesError
from lightrft.engines.types import ROUTES
from lightrft.models.loading import load_tokenizer
from lightrft.records.columns import MissingRoutesError
from lightrft.rollout.ledger_records import LedgerError

K, EXPERTS, LAYERS = 2, 8, 3


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_moe(tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="session")
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model)


def test_recorded_experts_are_replayed_in_every_pass(build_world):
    world = build_world(with_reference=True, use_kl_loss=True, off_policy_correction="tis")
    batch = world.trainer.make_experience()
    rollouts, mask = batch.rollouts, batch.rollouts.response_mask
    assert rollouts.facts[ROUTES].shape == (*mask.shape, K * LAYERS)
    assert rollouts.facts[ROUTES].dtype == torch.uint8
    gap = batch.outputs.old_logprobs[mask] - rollouts.rollout_logprobs[mask]
    assert gap.abs().max() < 1e-4
    assert len(world.trainer.actor.routers) == LAYERS
    metrics = world.trainer.ppo_train(1)
    assert metrics["routes_other_share"] < 0.02
    assert metrics["unreplayed_logprob_diff_mean"] < 1e-4
    assert metrics["unreplayed_correction_weight"] == pytest.approx(1, abs=1e-4)
    assert metrics["kl"] < 1e-5


def test_without_replay_nothing_is_recorded(build_world):
    world = build_world(routing_replay="off")
    batch = world.trainer.make_experience()
    assert ROUTES not in batch.rollouts.facts
    assert "routes_other_share" not in world.trainer.ppo_train(1)
    assert not world.trainer.actor.routers


@pytest.mark.parametrize(
    "options", [{"stream_chunk": 2}, {"rollout_lag": 1}, {"use_fire": True}], ids=str
)
def test_experts_come_with_every_way_to_sample(build_world, options):
    world = build_world(num_prompts=16, **options)
    for step in (1, 2):
        rollouts = world.trainer.make_experience().rollouts
        assert ROUTES in rollouts.facts
        world.trainer.ppo_train(step)


def by_token(text, change):
    """The experts of positions [positions, layers, k] of one token, changed."""
    values = np.frombuffer(bytes.fromhex(text), np.uint8).reshape(-1, LAYERS, K)
    return change(values).tobytes().hex()


class ChangingEngine(RecordingEngine):
    fact = ROUTES

    def changed(self, values, token_ids):
        return [by_token(text, self.change) for text in values]


class OtherLayers(ChangingEngine):
    def change(self, values):
        return np.roll(values, 1, axis=1)


class OtherTokens(ChangingEngine):
    """The experts of each token are those of the one before."""

    def changed(self, values, token_ids):
        whole, size = "".join(values), 2 * LAYERS * K
        moved = io.StringIO(whole[-size:] + whole[:-size])
        return [moved.read(len(text)) for text in values]


class OtherWeights(ChangingEngine):
    """As of another version of the weights, which choose something else entirely."""

    def change(self, values):
        return (values * 3 + 1) % EXPERTS


class OtherRows(ChangingEngine):
    before = None

    def changed(self, values, token_ids):
        self.before = self.before or "".join(values) * 20
        return [self.before[: len(text)] for text in values]


class LosesLast(ChangingEngine):
    def changed(self, values, token_ids):
        return [*values[:-1], ""]


class LosesPrompt(ChangingEngine):
    def changed(self, values, token_ids):
        return [values[0][2 * LAYERS * K :], *values[1:]]


OTHERS = RoutesError, "others than the trainer's routers choose"
MISSING = MissingRoutesError, r"(no experts of|bytes, expected)"


@pytest.mark.parametrize(
    "kind, error",
    [
        *((kind, OTHERS) for kind in (OtherLayers, OtherTokens, OtherWeights, OtherRows)),
        *((kind, MISSING) for kind in (LosesLast, LosesPrompt)),
    ],
)
def test_experts_of_something_else_and_missing_ones_end_the_run(build_world, kind, error):
    with pytest.raises(error[0], match=error[1]):
        planted(build_world, kind).trainer.make_experience()


class RecordsNone(HFEngine):
    def stream_rows(self, rows, params):
        return super().stream_rows(rows, dataclasses.replace(params, records_routes=False))


def test_an_engine_without_a_record_is_named(build_world, capsys):
    planted(build_world, RecordsNone).trainer.make_experience()
    assert capsys.readouterr().out.count("the engine records no experts") == 1


def test_experts_that_changed_on_their_way_to_the_trainer_are_found(build_world, monkeypatch):
    from lightrft.experience import delivery

    deliver_rows = delivery.deliver_rows

    def changed(*parts):
        rows = deliver_rows(*parts)
        routes = rows[ROUTES].copy()
        routes[[0, 1]] = routes[[1, 0]]
        return dataclasses.replace(rows, facts={**rows.facts, ROUTES: routes})

    monkeypatch.setattr(delivery, "deliver_rows", changed)
    with pytest.raises(LedgerError, match="routes differ from what the engine recorded"):
        build_world().trainer.make_experience()

"""Kept ids of truncated sampling: one law in engine and trainer, its gradient, planted faults."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from tests.engines.altered_engines import RecordingEngine, planted

from lightrft.config import TrainConfig
from lightrft.engines.sampling import kept_ids, pack_ids, sampling_logprobs
from lightrft.engines.types import KEPT_IDS, SamplingParams
from lightrft.experience import delivery
from lightrft.models import Actor
from lightrft.models.support import KeptSets, SamplingSupport
from lightrft.models.types import Replayed
from lightrft.records.columns import COLUMNS
from lightrft.records.recorded import SupportError
from lightrft.rollout.ledger_records import LedgerError
from lightrft.stages.parity_limits import ParityError
from lightrft.strategy.config import ConfigError

ALL = {"top_p": 0.8, "top_k": 20, "min_p": 0.1, "temperature": 0.6}
LAWS = [{name: value} for name, value in ALL.items()] + [ALL]


@pytest.mark.parametrize("options", LAWS, ids=str)
def test_an_unchanged_policy_has_ratio_one_at_every_token(build_world, options):
    world = build_world(off_policy_correction="tis", correction_high=10.0, **options)
    batch = world.trainer.make_experience()
    rollouts, mask = batch.rollouts, batch.rollouts.response_mask
    assert torch.equal(rollouts.compared_mask, mask)
    gap = batch.outputs.sampling_logprobs[mask] - rollouts.rollout_logprobs[mask]
    assert gap.exp().sub(1).abs().max() < 1e-5
    is_truncated = options.keys() != {"temperature"}
    assert (rollouts.support is not None) == is_truncated
    assert ("kept_sizes" in rollouts.facts) == is_truncated
    metrics = world.trainer.ppo_train(1)
    assert metrics["correction_raw_weight_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["logprob_diff_max"] < 1e-5
    if is_truncated:
        assert torch.equal(batch.outputs.old_logprobs, batch.outputs.sampling_logprobs)
        assert metrics["kept_ids_unrecorded_share"] == metrics["kept_ids_other_share"] == 0
        assert 1 < metrics["kept_ids_per_token"] < 200


def test_the_reference_is_compared_over_the_same_tokens(build_world):
    metrics = build_world(top_p=0.5, with_reference=True, train_batch_size=16).step()
    assert abs(metrics["kl"]) < 1e-6


def test_engine_logprobs_may_be_the_old_ones_where_all_kept_sets_are_recorded(build_world):
    options = {"use_rollout_logprobs": True, "top_k": 20}
    metrics = build_world(top_p=0.8, train_batch_size=16, **options).step()
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    for wrong in ({"top_p": 0.8}, {"top_k": 20, "truncated_logprobs": "all"}):
        with pytest.raises(ConfigError, match="needs the kept tokens of every place"):
            TrainConfig(use_rollout_logprobs=True, **wrong)
    with pytest.raises(SupportError, match="needs an engine that records"):
        planted(build_world, SilentEngine, top_p=0.8, **options).step()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
def test_the_expected_gradient_is_that_of_the_law_that_was_sampled_from(tiny_model, fused, packs):
    """Over all pairs of tokens that can be drawn, weighted by their probabilities."""
    actor = Actor.from_pretrained(
        str(tiny_model), fused_linear_logprob=fused, chunk_size=50
    ).double()
    params = SamplingParams(temperature=0.6, top_p=0.8, top_k=5, min_p=0.1)
    prompt = [3, 4, 5]

    def law(ids):
        logits = actor.model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
        logits = actor.head(logits) / params.temperature
        kept = sampling_logprobs(logits.detach()[None] * params.temperature, params)[0].isfinite()
        return logits.masked_fill(~kept, -torch.inf).log_softmax(
            0
        ), kept.nonzero().flatten().tolist()

    first, kept_first = law(prompt)
    seconds = {token: law([*prompt, token]) for token in kept_first}
    pairs = [(a, b) for a in kept_first for b in seconds[a][1]]
    assert len(pairs) > 5
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(len(pairs), generator=generator, dtype=torch.float64)
    exact = torch.stack([first[a] + seconds[a][0][b] for a, b in pairs])
    (exact.exp() * rewards).sum().backward()
    expected = {name: p.grad.clone() for name, p in actor.named_parameters()}
    actor.zero_grad()

    rows = torch.tensor([[*prompt, a, b] for a, b in pairs])
    sets = [ids for a, _ in pairs for ids in (kept_first, seconds[a][1])]
    sizes = torch.tensor([len(ids) for ids in sets])
    places = torch.zeros(2, len(pairs), 5, dtype=torch.int64)
    places[0, :, 3:] = (sizes.cumsum(0) - sizes).view(-1, 2)
    places[1, :, 3:] = sizes.view(-1, 2)
    kept = KeptSets(torch.tensor([*itertools.chain(*sets)]).int(), *places, is_complete=True)
    if packs:
        actor.pack_samples()
    output = actor(
        rows,
        torch.ones_like(rows, dtype=torch.bool),
        scored_mask=(torch.arange(5) > 2).expand(len(pairs), 5),
        temperature=params.temperature,
        recorded=Replayed(SamplingSupport(5, 0.8, 0.1, renormalises=True, kept=kept)),
    )
    torch.testing.assert_close(output.logprobs.sum(1).double(), exact.detach(), rtol=0, atol=1e-6)
    # What the loss does at ratio 1: the probability of a row times its reward, times its logprob.
    (exact.detach().exp() * rewards * output.logprobs.sum(1)).sum().backward()
    for name, parameter in actor.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-7)


class ChangingEngine(RecordingEngine):
    fact = KEPT_IDS

    def changed(self, values, token_ids):
        return [
            pack_ids(self.change(np.frombuffer(bytes.fromhex(ids), "<i4").tolist(), token))
            for ids, token in zip(values, token_ids, strict=True)
        ]


class SilentEngine(ChangingEngine):
    def change(self, ids, token):
        return []


class LosingEngine(ChangingEngine):
    def change(self, ids, token):
        return [i for i in ids if i != token]


class RepeatingEngine(ChangingEngine):
    def change(self, ids, token):
        return sorted([*ids, token])


class GenerousEngine(ChangingEngine):
    """One id too many, and a token that is so unlikely that no logprob shows it."""

    def change(self, ids, token):
        return sorted([*ids, next(i for i in range(255, 0, -1) if i not in ids)])


@pytest.mark.parametrize(
    "kind, error, message",
    [
        (LosingEngine, SupportError, "was drawn, and is 0 times among"),
        (RepeatingEngine, SupportError, "was drawn, and is 2 times among"),
        (GenerousEngine, ParityError, "for 9. of 96 tokens, .*too many"),
    ],
)
def test_an_engine_that_records_wrong_sets_is_found(build_world, kind, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        planted(build_world, kind, top_p=0.8).trainer.make_experience()


def test_an_engine_that_records_nothing_is_replayed_as_before(build_world):
    batch = planted(build_world, SilentEngine, top_p=0.8).trainer.make_experience()
    mask = batch.rollouts.compared_mask
    assert torch.equal(mask, batch.rollouts.response_mask)
    engine = batch.rollouts.rollout_logprobs[mask]
    torch.testing.assert_close(batch.outputs.sampling_logprobs[mask], engine, rtol=0, atol=1e-5)
    assert (batch.outputs.old_logprobs[mask] - engine).abs().max() > 1e-2


@pytest.mark.parametrize("law", ["kept", "all"])
def test_single_tokens_without_a_record_are_replayed(build_world, monkeypatch, law):
    def only_some(law):
        return [ids if place % 2 else "" for place, ids in enumerate(kept_ids(law))]

    monkeypatch.setattr("lightrft.engines.hf.decode.kept_ids", only_some)
    batch = build_world(top_p=0.8, truncated_logprobs=law).trainer.make_experience()
    rollouts, mask = batch.rollouts, batch.rollouts.response_mask
    is_recorded = rollouts.facts["kept_sizes"][mask] > 0
    assert 0 < is_recorded.sum() < len(is_recorded)
    engine = rollouts.rollout_logprobs[mask]
    sampling, old = batch.outputs.sampling_logprobs[mask], batch.outputs.old_logprobs[mask]
    torch.testing.assert_close(sampling, engine, rtol=0, atol=1e-5)
    assert torch.equal((old - engine).abs() < 1e-4, is_recorded & (law == "kept"))


def test_ids_that_changed_on_their_way_to_the_trainer_are_found(build_world, monkeypatch):
    right = delivery.deliver_rows

    def changed(*parts):
        table = right(*parts)
        ids = table[KEPT_IDS].copy()
        ids[-1] += 1
        return dataclasses.replace(table, facts={**table.facts, KEPT_IDS: ids})

    monkeypatch.setattr(delivery, "deliver_rows", changed)
    with pytest.raises(LedgerError, match="kept_ids differ from what the engine recorded"):
        build_world(top_p=0.8).trainer.make_experience()


def test_the_column_is_left_out_where_nothing_is_truncated(build_world):
    rows = build_world(temperature=0.6).trainer.make_experience()
    assert "kept_sizes" not in rows.rollouts.facts
    column = COLUMNS[KEPT_IDS]
    assert not len(column.pack(3, ("", ""), [0, 0]))
    # The sizes of both tokens, then three ids.
    assert column.pack(3, (pack_ids([5, 9]), pack_ids([7])), [0, 0]).tolist() == [2, 1, 5, 9, 7]

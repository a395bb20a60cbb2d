"""One process: what is sent, what is shared, what stays, and what every sync reports."""

import gc
from contextlib import contextmanager

import pytest
import torch
from tests.engines.altered_engines import embedded
from tests.engines.fake_engine import FakeEngine
from tests.engines.syncs import canary_of, failing
from tests.models.tiny import tiny_model
from torch import nn

from lightrft.engines import EngineConfig, EngineParameter
from lightrft.engines.hf.engine import HFEngine
from lightrft.kernels import hash_tensor
from lightrft.models import Actor
from lightrft.strategy.weight_sync.canary import score_with_actor
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, module_parameter_source
from lightrft.strategy.weight_sync.sync import WeightSync
from lightrft.strategy.weight_sync.verification import (
    WeightSyncError,
    match_parameters,
    model_hash,
    parameters_to_send,
)

CPU = torch.device("cpu")


def tiny_actor(*, is_tied=False, seed=0):
    return Actor(tiny_model(tie_word_embeddings=is_tied, seed=seed))


def hf_engine(kind=HFEngine, *, is_tied=False):
    return embedded(tiny_model(tie_word_embeddings=is_tied, seed=99), kind)


def fake_engine(module, kind=FakeEngine, *, dtype="float32"):
    return kind.for_module(EngineConfig("fake", "", dtype), module)


def send(sync, actor):
    """Sync an actor's weights and compare a canary."""
    return sync.sync(module_parameter_source(actor), canary=canary_of(actor))


def assert_holds(engine, actor):
    stored = dict(engine.native.named_parameters())
    expected = dict(actor.model.named_parameters())
    assert set(stored) == set(expected)
    for name, parameter in expected.items():
        assert torch.equal(stored[name], parameter), name


def change_weights(actor):
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.0625)


def engine_parameter(name, *shape, **details):
    return EngineParameter(name=name, shape=shape, dtype=torch.float32, **details)


def source_of(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module_parameter_source(module)


class CountingEngine(HFEngine):
    """Writes down which parameters it is asked to hash."""

    asked = ()

    def hash_parameters(self, names=None):
        self.asked = tuple(names)
        return super().hash_parameters(names)


class StaleCopiesEngine(HFEngine):
    """Fault: agrees to share storage and keeps its own."""

    def alias_weights(self, tensors):
        return True


class SharesUnderWrongNamesEngine(HFEngine):
    """Fault: takes two tensors of one shape for each other."""

    def alias_weights(self, tensors):
        up, gate = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate"))
        return super().alias_weights({**tensors, up: tensors[gate], gate: tensors[up]})


def test_shared_storage_is_copied_never_hashed_once_and_said_to_be_shared():
    actor, engine = tiny_actor(is_tied=True), hf_engine(CountingEngine, is_tied=True)
    num_bytes = sum(parameter.numel() * 4 for parameter in actor.parameters())
    shared = send(WeightSync(engine), actor)
    assert shared.is_aliased
    assert (shared.num_bytes, shared.num_buckets, engine.asked) == (0, 0, ())
    assert shared.num_aliased_bytes == shared.num_verified_bytes == num_bytes
    assert "aliased, the same memory, hashed once" in shared.summary()
    assert f"(of it {num_bytes / 2**20:.1f} MB aliased" in shared.summary()
    own = dict(actor.model.named_parameters())
    for name, parameter in engine.native.named_parameters():
        assert parameter.data_ptr() == own[name].data_ptr(), name
    # Storage of its own is read, and gives the same hash: it depends on names and values alone.
    copied = WeightSync(engine, allow_alias=False).sync(module_parameter_source(actor))
    assert set(engine.asked) == set(own)
    assert (copied.num_aliased_bytes, copied.num_verified_bytes) == (0, num_bytes)
    assert copied.engine_hash == shared.engine_hash


def test_an_engine_that_only_claims_to_share_is_hashed_and_found():
    actor = tiny_actor()
    with failing("hash", "differ from the trainer's"):
        WeightSync(hf_engine(StaleCopiesEngine)).sync(module_parameter_source(actor))
    with failing("hash") as caught:
        WeightSync(hf_engine(SharesUnderWrongNamesEngine)).sync(module_parameter_source(actor))
    assert set(caught.value.names) == {
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
    }


def test_another_actor_is_honoured_and_a_shared_one_is_never_overwritten():
    first, second, engine = tiny_actor(), tiny_actor(seed=5), hf_engine()
    sync = WeightSync(engine)
    sync.sync(module_parameter_source(first))
    before = [parameter.detach().clone() for parameter in first.parameters()]
    sync.allow_alias = False
    report = send(sync, second)
    assert not report.is_aliased
    assert_holds(engine, second)
    assert all(torch.equal(p, b) for p, b in zip(first.parameters(), before, strict=True))
    change_weights(second)
    # Positive control for `assert_holds`: storage is not shared any more.
    with pytest.raises(AssertionError):
        assert_holds(engine, second)


def test_frozen_parameters_are_sent_once_and_again_when_dropped_or_loaded():
    actor, engine = tiny_actor(), hf_engine()
    actor.model.model.layers[0].requires_grad_(False)
    num_frozen_bytes = sum(p.numel() * 4 for p in actor.parameters() if not p.requires_grad)
    num_bytes = sum(p.numel() * 4 for p in actor.parameters())
    sync = WeightSync(engine, allow_alias=False)

    def sent(which=actor):
        report = sync.sync(module_parameter_source(which))
        assert_holds(engine, which)
        assert report.num_verified_bytes == num_bytes
        return report.num_bytes

    assert sent() == num_bytes
    change_weights(actor)
    assert sent() == num_bytes - num_frozen_bytes
    engine.sleep(level=2)
    engine.wake_up()
    assert sent() == num_bytes
    assert sent() == num_bytes - num_frozen_bytes
    with torch.no_grad():
        actor.model.model.layers[0].mlp.up_proj.weight.zero_()
    for _ in range(2):  # also where the sync before failed
        with failing("hash", "1 frozen .* changed since .*layers.0.mlp.up_proj.weight; nothing"):
            sent()
    sync.forget()
    assert sent() == num_bytes
    other = tiny_actor(seed=5)
    other.model.model.layers[0].requires_grad_(False)
    assert sent(other) == num_bytes
    assert sent(actor) == num_bytes


def test_without_verification_frozen_parameters_follow_the_actors_identity():
    actor, engine = tiny_actor(), hf_engine()
    actor.requires_grad_(False)
    sync = WeightSync(engine, allow_alias=False, verify=False)
    assert sync.sync(module_parameter_source(actor)).num_bytes > 0
    report = sync.sync(module_parameter_source(actor))
    assert report.num_bytes == report.num_verified_bytes == report.engine_hash == 0
    assert report.canary_difference is None
    assert "not verified" in report.summary()
    del actor
    gc.collect()
    other = tiny_actor(seed=5)
    other.requires_grad_(False)
    assert sync.sync(module_parameter_source(other)).num_bytes > 0
    assert_holds(engine, other)


def test_without_verification_what_was_trained_until_it_was_frozen_is_sent_once_more():
    actor, engine = tiny_actor(), hf_engine()
    sync = WeightSync(engine, allow_alias=False, verify=False)
    num_bytes = sync.sync(module_parameter_source(actor)).num_bytes
    change_weights(actor)
    actor.requires_grad_(False)
    assert sync.sync(module_parameter_source(actor)).num_bytes == num_bytes
    assert_holds(engine, actor)
    assert sync.sync(module_parameter_source(actor)).num_bytes == 0


def test_an_engine_with_another_law_is_not_asked_for_the_canary():
    actor = tiny_actor()
    engine = fake_engine(actor.model)
    report = send(WeightSync(engine), actor)
    assert report.canary_difference is None
    assert "generate" not in engine.calls
    assert "score" not in engine.calls


@contextmanager
def failing_caches(monkeypatch, engine):
    """A sync within ends in an error, since the engine's caches cannot be reset."""
    with monkeypatch.context() as patch, pytest.raises(WeightSyncError, match="ZeroDivisionError"):
        patch.setattr(engine, "reset_caches", lambda: 1 / 0)
        yield


def test_over_shared_storage_the_canary_is_scored_when_something_may_be_new(monkeypatch):
    first, second, engine = tiny_actor(), tiny_actor(), hf_engine()
    sync = WeightSync(engine)

    def is_scored(actor, *, has_moved=True):
        if has_moved:
            change_weights(actor)
        report = send(sync, actor)
        assert report.is_aliased
        assert report.num_verified_bytes == report.num_aliased_bytes > 0
        return report.canary_difference is not None

    assert [is_scored(first) for _ in range(12)] == [index % 10 == 0 for index in range(12)]
    # Other tensors; then none has moved; then one has not.
    assert [is_scored(second) for _ in range(2)] == [True, False]
    assert is_scored(second, has_moved=False)
    before = second.model.lm_head.weight.detach().clone()
    change_weights(second)
    with torch.no_grad():
        second.model.lm_head.weight.copy_(before)
    assert is_scored(second, has_moved=False)
    assert not is_scored(second)
    with failing_caches(monkeypatch, engine):
        is_scored(second)
    assert [is_scored(second) for _ in range(2)] == [True, False]


def test_over_shared_storage_a_sync_without_canary_vouches_for_nothing(monkeypatch):
    actor, engine = tiny_actor(), hf_engine()
    sync = WeightSync(engine)
    sync.sync(module_parameter_source(actor), canary=None)
    change_weights(actor)
    assert send(sync, actor).canary_difference is not None
    with failing_caches(monkeypatch, engine):
        sync.sync(module_parameter_source(actor), canary=None)
    change_weights(actor)
    assert send(sync, actor).canary_difference is not None


class OpaqueEngine(FakeEngine):
    """Says that one parameter cannot be read back."""

    def parameter_manifest(self):
        return tuple(
            EngineParameter(p.name, p.shape, p.dtype, verifiable=p.name != "weight")
            for p in super().parameter_manifest()
        )

    def hash_parameters(self, names=None):
        assert names is not None
        assert "weight" not in names
        return super().hash_parameters(names)


def test_parameters_that_cannot_be_read_back_are_hashed_as_handed_over():
    module = nn.Linear(40, 30)
    engine = fake_engine(module, OpaqueEngine)
    sync = WeightSync(engine, allow_alias=False, bucket_bytes=1024)
    report = sync.sync(module_parameter_source(module))
    assert report.num_unverifiable_bytes == 40 * 30 * 4
    assert report.num_verified_bytes == 30 * 4
    assert report.engine_hash == model_hash(
        {name: hash_tensor(value) for name, value in module.named_parameters()}
    )
    module.requires_grad_(False)
    assert sync.sync(module_parameter_source(module)).num_resident_bytes == 0
    resident = sync.sync(module_parameter_source(module))
    assert resident.num_bytes == 0
    assert resident.engine_hash == report.engine_hash


def test_adapters_are_added_before_rounding_and_verified():
    module = nn.Linear(6, 5)
    delta = torch.randn(30, generator=torch.Generator().manual_seed(0))

    def add_local(name, start, values):
        assert values.dtype == torch.float32
        if name == "weight":
            values += delta[start : start + values.numel()]

    base = module_parameter_source(module)
    source = ParameterSource(module, base.entries, add_local=add_local)
    engine = fake_engine(module, dtype="bfloat16")
    before = module.weight.detach().clone()
    report = WeightSync(engine).sync(source)
    assert not report.is_aliased
    merged = (module.weight.detach() + delta.view(5, 6)).to(torch.bfloat16)
    assert engine.hash_parameters(["weight"])["weight"] == hash_tensor(merged)
    assert torch.equal(module.weight, before)


def test_what_only_the_trainer_ties_is_sent_under_both_names():
    actor, engine = tiny_actor(is_tied=True), hf_engine(is_tied=False)
    send(WeightSync(engine), actor)
    embedding = actor.model.get_input_embeddings().weight
    assert torch.equal(engine.native.get_input_embeddings().weight, embedding)
    assert torch.equal(engine.native.get_output_embeddings().weight, embedding)


def test_what_only_the_engine_ties_is_refused():
    engine = hf_engine(is_tied=True)
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight \(tied to .* engine only\)"):
        WeightSync(engine).sync(module_parameter_source(tiny_actor(is_tied=False)))


def test_accounting_names_everything_that_is_missing_unknown_or_of_another_shape():
    manifest = (
        engine_parameter("both", 2, 3),
        engine_parameter("only_engine", 4),
        engine_parameter("transposed", 2, 3),
        engine_parameter("second_name", 2, 3, tied_to="both"),
    )
    source = source_of(
        both=torch.zeros(2, 3), transposed=torch.zeros(3, 2), only_trainer=torch.zeros(1)
    )
    with failing("accounting") as caught:
        match_parameters(manifest, source.parameters(), source.tied_names)
    assert set(caught.value.names) == {"only_engine", "only_trainer", "transposed"}
    assert "shape (3, 2) in the trainer, (2, 3) in the engine" in str(caught.value)


def test_a_fused_engine_layer_is_sent_whole():
    manifest = (
        engine_parameter("q", 2, 2, fused_with=("k",)),
        engine_parameter("k", 2, 2, fused_with=("q",)),
        engine_parameter("alone", 2),
    )
    source = source_of(q=torch.zeros(2, 2), k=torch.zeros(2, 2), alone=torch.zeros(2))
    pairs = match_parameters(manifest, source.parameters(), {})
    sent = parameters_to_send(pairs, frozenset({"q", "alone"}))
    assert [pair.name for pair in sent] == ["q", "k"]
    assert parameters_to_send(pairs, frozenset({"q", "k", "alone"})) == ()


def test_model_hash_depends_on_names_and_values_but_not_on_their_order():
    hashes = {"a": 1, "b": -2, "c": 2**62}
    assert model_hash(hashes) == model_hash(dict(reversed(hashes.items())))
    assert -(2**63) <= model_hash(hashes) < 2**63
    assert model_hash({}) == 0
    swapped = {"a": -2, "b": 1, "c": 2**62}
    assert len({model_hash(h) for h in (hashes, swapped, {**hashes, "c": 0})}) == 3


def test_scoring_leaves_every_module_in_its_mode_and_agrees_with_a_bare_model():
    actor = tiny_actor()
    actor.train()
    actor.model.model.layers[0].eval()
    token_ids = (3, 17, 64, 5, 9)
    scores = score_with_actor(actor, token_ids, device=CPU)
    assert actor.training
    assert actor.model.model.layers[1].training
    assert not actor.model.model.layers[0].training
    bare = score_with_actor(tiny_model(), token_ids, device=CPU, is_bare=True)
    assert scores[0] == bare[0] == 0.0
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(bare), atol=1e-5, rtol=0)


def test_a_module_without_a_language_model_has_no_canary():
    assert canary_of(nn.Linear(2, 2)) is None

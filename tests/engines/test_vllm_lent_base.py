"""A frozen base that lies in vLLM's tensors, where trainer and engine read it."""

import math
from contextlib import contextmanager, nullcontext

import pytest
import torch
from tests.engines import lent_memory
from tests.engines.syncs import failing
from tests.engines.vllm_adapters import (
    actor_at,
    answers,
    old_base,
    plain_products,
    require_equal_answers,
)
from tests.ranks import run_multiprocess
from tests.strategy.backend_world import make, prepared

pytestmark = pytest.mark.vllm
IDS = torch.arange(24).view(2, 12) * 5 % 97
OPTIONS = {
    "engine_type": "vllm",
    "engine_args": {"block_size": 32},
    "lora_sync": "adapter",
    "enable_engine_sleep": True,
    "bf16": False,
    "max_len": 64,
}
DOWN = "model.layers.0.mlp.down_proj"


@contextmanager
def running(folder, backend="fake", products=plain_products, **options):
    """Yields a strategy, an actor with adapters and its engine, started as a run starts them."""
    actor = actor_at(folder)
    with make(backend, pretrain=str(folder), **OPTIONS | options) as strategy:
        ready = prepared(strategy, actor)
        with products():
            engine = strategy.setup_inference_engine(None, "vllm", actor=ready)
        strategy.wakeup_inference_engine()
        yield strategy, ready, engine


def local_of(parameter):
    return getattr(parameter, "to_local", lambda: parameter)()


def frozen_of(strategy, ready):
    """This process's tensors of the actor's base, by the checkpoint's names."""
    model = strategy.unwrap_model(ready).model
    named = dict(model.named_parameters())
    return {n.replace(".base_layer", ""): p for n, p in named.items() if not p.requires_grad}


def storages(tensors):
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def step(strategy, ready):
    """Trains once; returns the gradients of the adapters."""
    with strategy.accumulation(1, ready.optimizer):
        loss = -ready.model(IDS, torch.ones_like(IDS).bool()).logprobs.sum() / 22
        strategy.backward(loss, ready.model, ready.optimizer)
        named = strategy.unwrap_model(ready).named_parameters()
        gradients = {n: local_of(p.grad).clone() for n, p in named if p.grad is not None}
        strategy.optimizer_step(ready.optimizer, ready.model, ready.scheduler)
    return gradients


def scores_of(ready):
    with torch.no_grad():
        return ready.model(IDS, torch.ones_like(IDS).bool()).logprobs[:, 1:]


@pytest.mark.parametrize("backend", ["fake", "fsdp2", "zero2"])
def test_trainer_and_vllm_hold_one_base(backend, tmp_path):
    if backend == "zero2":
        pytest.importorskip("deepspeed", reason="package deepspeed is not installed")
    with make(backend, pretrain=str(tmp_path), **OPTIONS) as strategy:
        alone = prepared(strategy, actor_at(tmp_path))
        expected = [step(strategy, alone) for _ in range(2)]
        last = scores_of(alone)
    with running(tmp_path, backend) as (strategy, ready, engine):
        frozen = frozen_of(strategy, ready)
        assert engine.lent_names == frozen.keys()
        num_bytes = sum(4 * p.numel() for p in frozen.values())
        for gradients in expected:
            report = strategy.last_weight_sync
            assert report.num_aliased_bytes == num_bytes
            assert report.num_verified_bytes == num_bytes + report.num_bytes
            with_engine = step(strategy, ready)
            for name, gradient in gradients.items():
                torch.testing.assert_close(with_engine[name], gradient, rtol=1e-5, atol=1e-6)
            strategy.update_engine_weights(ready)
        scores = torch.tensor([engine.score(row)[1:] for row in IDS.tolist()])
        torch.testing.assert_close(scores, last, rtol=0, atol=2e-5)
        held = storages(engine.started.model.parameters())
        assert storages(map(local_of, frozen_of(strategy, ready).values())).keys() <= held.keys()
        # What is written there is read in the trainer's passes, too.
        old_base(engine, 0.1)
        assert (scores_of(ready) - last).abs().max() > 1e-3


@pytest.mark.full
def test_a_process_has_memory_for_one_base_of_135m(tmp_path):
    measured = [
        run_multiprocess(lent_memory.measure, 1, timeout_seconds=280, args=(tmp_path, shares))[0]
        for shares in (True, False)
    ]
    (base, aliased, once), (_, apart, twice) = measured
    assert (aliased, apart) == (base, 0)
    assert twice - once == pytest.approx(base, rel=0.1), measured


def test_a_write_on_either_side_ends_the_run(tmp_path):
    with running(tmp_path) as (strategy, ready, engine):
        ours = frozen_of(strategy, ready)[f"{DOWN}.weight"]
        for tensor in (ours, engine.weights.modules[DOWN].weight):
            kept = tensor.data[0, 0].clone()
            tensor.data[0, 0] += 1e-3
            for _ in range(2):
                with failing("hash", f"1 frozen .*changed since .*{DOWN}.weight"):
                    strategy.update_engine_weights(ready)
            tensor.data[0, 0] = kept
            strategy.update_engine_weights(ready)


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_base_that_moved_is_not_taken_for_the_other_s(side, tmp_path):
    with running(tmp_path) as (strategy, ready, engine):
        tensor = frozen_of(strategy, ready)[f"{DOWN}.weight"]
        if side == "engine":
            tensor = engine.weights.modules[DOWN].weight
        kept, tensor.data = tensor.data, tensor.data.clone()
        with failing("transfer", f"1 of 25 weights .* at two addresses .first: {DOWN}.weight"):
            strategy.update_engine_weights(ready)
        tensor.data = kept
        strategy.update_engine_weights(ready)


def test_sleep_frees_the_cache_only(tmp_path, monkeypatch):
    from vllm.v1.worker.cpu_worker import CPUWorker

    calls = []

    def discard(self, tags):
        calls.append(("discard", *tags))
        for cache in self.model_runner.kv_caches:
            cache.fill_(math.nan)

    monkeypatch.setattr(CPUWorker, "discard", discard)
    monkeypatch.setattr(CPUWorker, "sleep", lambda self, level: calls.append(level))
    monkeypatch.setattr(CPUWorker, "wake_up", lambda self, tags: calls.append(("wake", *tags)))
    with running(tmp_path) as (strategy, ready, engine):
        calls.clear()
        # As on a GPU; vLLM frees nothing on a CPU.
        engine.started.model_config.enable_sleep_mode = True
        expected = answers(engine)
        for wake in ("wakeup_inference_engine", "update_engine_weights"):
            strategy.sleep_until_weight_sync()
            scores = scores_of(ready)
            getattr(strategy, wake)(*[ready][: wake.startswith("update")])
            assert calls == [("discard", "kv_cache"), ("wake", "kv_cache")]
            calls.clear()
            require_equal_answers(answers(engine), expected)
            assert torch.equal(scores_of(ready), scores)


def test_an_engine_that_starts_anew_lends_its_tensors(tmp_path):
    with running(tmp_path) as (strategy, ready, engine):
        held, scores = storages(engine.started.model.parameters()), scores_of(ready)
        strategy.session.close()
        assert not storages(frozen_of(strategy, ready).values()).keys() & held.keys()
        assert torch.equal(scores_of(ready), scores)
        with plain_products():
            engine = strategy.setup_inference_engine(None, "vllm", actor=ready)
        held = storages(engine.started.model.parameters())
        assert storages(frozen_of(strategy, ready).values()).keys() <= held.keys()
        assert engine.lent_names == frozen_of(strategy, ready).keys()


def test_a_start_that_fails_leaves_the_base_where_it_was(tmp_path):
    wrong = {"engine_args": {"max_num_seqs": 0}}
    with make("fake", pretrain=str(tmp_path), **OPTIONS | wrong) as strategy:
        ready = prepared(strategy, actor_at(tmp_path))
        before = {n: p.data_ptr() for n, p in frozen_of(strategy, ready).items()}
        with pytest.raises(Exception, match="max_num_seqs"):
            strategy.setup_inference_engine(None, "vllm", actor=ready)
        assert before == {n: p.data_ptr() for n, p in frozen_of(strategy, ready).items()}


def test_another_base_in_the_file_is_not_lent_and_ends_the_run(tmp_path):
    actor = actor_at(tmp_path)
    with make("fake", pretrain=str(tmp_path), **OPTIONS) as strategy, plain_products():
        ready = prepared(strategy, actor)
        frozen_of(strategy, ready)[f"{DOWN}.weight"].data[0, 0] += 1e-3
        with failing("hash", f"1 of .*differ.*{DOWN}.weight"):
            strategy.setup_inference_engine(None, "vllm", actor=ready)
        assert strategy.inference_engine.lent_names.isdisjoint([f"{DOWN}.weight"])


def test_on_a_cpu_vllm_keeps_products_in_an_order_of_its_own(tmp_path):
    """The obstacle there: oneDNN packs each matrix at the start, and vLLM drops the plain one."""
    with running(tmp_path, products=nullcontext) as (strategy, ready, engine):
        products = {n for n in frozen_of(strategy, ready) if "_proj." in n or "lm_head" in n}
        assert engine.lent_names == frozen_of(strategy, ready).keys() - products
        modules = engine.started.model.named_modules()
        packed = [m for n, m in modules if n.endswith("_proj.base_layer")]
        assert [each.weight.numel() for each in packed] == [0] * 8

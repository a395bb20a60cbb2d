"""A strategy is made of parts: what the whole promises, and what the parts leave behind."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from tests.engines.fake_engine import FakeEngine
from tests.models.tiny import tiny_model
from torch import nn

from lightrft.engines.types import SamplingParams
from lightrft.strategy import get_fake_strategy, get_strategy
from lightrft.strategy.engine.generation import as_sampling_params
from lightrft.strategy.weight_sync.sync import WeightSync

SMALL = {"train_batch_size": 1, "micro_train_batch_size": 1}


@pytest.mark.parametrize("fsdp", [True, pytest.param(False, marks=pytest.mark.deepspeed)])
def test_one_process_needs_no_launcher(monkeypatch, fsdp):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with get_strategy({"fsdp": fsdp, "bf16": False, **SMALL}) as strategy:
        assert (strategy.get_rank(), strategy.world_size) == (0, 1)
        assert strategy.all_reduce(3, "sum") == 3
        model = nn.Linear(2, 1)
        ready, *_ = strategy.prepare_models_and_optimizers(model, None, None, None, None, 2)
        strategy.backward(ready(torch.ones(1, 2)).sum(), ready, ready.optimizer)
        assert strategy.optimizer_step(ready.optimizer, ready, ready.scheduler).grad_norm > 0
    assert not torch.distributed.is_initialized()


def test_a_prepared_model_is_called_like_its_model():
    with get_fake_strategy(SMALL) as strategy:
        actor, critic, *_ = strategy.prepare_models_and_optimizers(
            nn.Linear(2, 1), None, None, None, None, 4
        )
        inputs = torch.ones(3, 2)
        assert torch.equal(actor(inputs), actor.model(inputs))
        with pytest.raises(ValueError, match="no model"):
            critic(inputs)


@pytest.mark.parametrize("engine_type", ["hf", "fake"])
def test_a_closed_engine_leaves_nothing_behind(engine_type):
    strategy = get_fake_strategy({**SMALL, "bf16": False})
    actor, *_ = strategy.prepare_models_and_optimizers(tiny_model(), None, None, None, None, 4)
    engine = strategy.setup_inference_engine(None, engine_type, actor)
    strategy.gather_and_generate({"max_tokens": 2}, [[3, 4]])
    assert isinstance(strategy.broadcast_manager, WeightSync)
    assert strategy.vllm_engine is engine
    assert strategy.vllm_mp_group is strategy.engine_mp_group
    trace = weakref.ref(engine)
    del engine
    strategy.setup_inference_engine(None, engine_type, actor)
    gc.collect()
    assert trace() is None
    trace = weakref.ref(strategy.inference_engine)
    strategy.close()
    gc.collect()
    assert trace() is None
    assert strategy.inference_engine is None
    assert strategy.broadcast_manager is None
    assert strategy.last_weight_sync.weights_version == 0


def test_results_are_read_by_attribute_or_by_name():
    with get_fake_strategy(SMALL) as strategy:
        strategy.setup_inference_engine(None, "fake", nn.Linear(2, 3))
        strategy.inference_engine.set_weights_version(0)
        (found,) = strategy.gather_and_generate({"max_tokens": 2}, [[3, 4]])
    assert found["output_token_ids"] == found.output_token_ids
    assert found["prompt_token_ids"] == (3, 4)
    with pytest.raises(KeyError, match=r"it has .*output_token_ids"):
        found["output_ids"]


def test_every_engine_takes_sampling_parameters_in_the_form_of_another():
    engine = FakeEngine()
    sglang = SimpleNamespace(temperature=0.5, max_new_tokens=3, sampling_seed=7)
    expected = SamplingParams(temperature=0.5, max_tokens=3, seed=7)
    assert as_sampling_params(sglang, engine) == expected
    with pytest.raises(TypeError, match="SamplingParams or a mapping"):
        as_sampling_params(object(), engine)

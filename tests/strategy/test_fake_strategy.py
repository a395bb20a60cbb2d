"""What one process does, with which all strategies are compared in test_backends_agree.py."""

import pytest
import torch
from tests.models.tiny import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from lightrft.strategy import PreparedModel, get_fake_strategy
from lightrft.strategy.config import ConfigError


class TinyModel(nn.Module):
    """One hidden layer; deterministic given the seed."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs):
        return self.layers(inputs)


def batch(num_rows):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(num_rows, width, generator=generator) for width in (4, 3)]


def prepared(strategy, seed=0):
    actor, *_ = strategy.prepare_models_and_optimizers(TinyModel(seed), None, None, None, None, 20)
    return actor


def strategy_with(**settings):
    return get_fake_strategy({"actor_learning_rate": 1e-2, "train_batch_size": 1, **settings})


def train_step(strategy, ready, inputs, targets, name="actor"):
    loss = (ready.model(inputs) - targets).square().mean()
    strategy.backward(loss, ready, ready.optimizer)
    return strategy.optimizer_step(ready.optimizer, ready, ready.scheduler, name=name)


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_accumulation_equals_one_step_on_the_whole_batch():
    inputs, targets = batch(8)
    whole, parts, shares = (strategy_with(train_batch_size=size) for size in (1, 4, 64))
    expected, by_parts, by_shares = (prepared(each) for each in (whole, parts, shares))
    for sizes in ([3, 5], [1, 1, 6], [8]):
        train_step(whole, expected, inputs, targets)
        results = [
            train_step(parts, by_parts, inputs[i : i + 2], targets[i : i + 2]) for i in (0, 2, 4, 6)
        ]
        assert [r is None for r in results] == [True, True, True, False]
        start = 0
        with shares.accumulation(len(sizes), by_shares.optimizer):
            for size in sizes:
                rows = slice(start, start + size)
                loss = (by_shares(inputs[rows]) - targets[rows]).square().sum() / targets.numel()
                shares.backward(loss, by_shares, by_shares.optimizer)
                result = shares.optimizer_step(by_shares.optimizer, by_shares, by_shares.scheduler)
                start += size
                assert (result is None) == (start < 8)
    for ready in (by_parts, by_shares):
        torch.testing.assert_close(weights(ready.model), weights(expected.model))


def test_accumulation_left_early_or_overrun_or_nested_is_an_error():
    strategy = strategy_with()
    ready = prepared(strategy)
    with (
        pytest.raises(RuntimeError, match="after 0 of 2"),
        strategy.accumulation(2, ready.optimizer),
    ):
        pass
    with pytest.raises(KeyError), strategy.accumulation(2, ready.optimizer):
        raise KeyError("the caller's own error is not replaced")
    with (
        pytest.raises(RuntimeError, match="more than 1"),
        strategy.accumulation(1, ready.optimizer),
    ):
        train_step(strategy, ready, *batch(2))
        train_step(strategy, ready, *batch(2))
    with strategy.accumulation(1, ready.optimizer):
        with pytest.raises(RuntimeError, match="middle"), strategy.accumulation(1, ready.optimizer):
            pass
        train_step(strategy, ready, *batch(2))
    with pytest.raises(ValueError, match="positive"), strategy.accumulation(0, ready.optimizer):
        pass


def test_interleaved_optimizers_count_and_clip_for_themselves():
    inputs, targets = batch(4)
    strategy = strategy_with(train_batch_size=2, max_norm=0.5)
    actor, critic = prepared(strategy, seed=0), prepared(strategy, seed=5)
    alone_strategy = strategy_with(train_batch_size=2, max_norm=0.5)
    alone = prepared(alone_strategy, seed=0)
    for step in range(4):
        mixed = train_step(strategy, actor, inputs, 100 * targets, name="actor")
        single = train_step(alone_strategy, alone, inputs, 100 * targets)
        train_step(strategy, critic, inputs, targets, name="critic")
        assert (mixed is None) == (single is None) == (step % 2 == 0)
    assert mixed == single
    assert mixed.grad_norm > 0.5
    assert torch.equal(weights(actor.model), weights(alone.model))


def test_prepare_takes_each_form():
    strategy = strategy_with()
    model = TinyModel()
    optimizer = strategy.create_optimizer(model)
    assert strategy.prepare(None) is None
    assert strategy.prepare(TinyModel()).training is False
    triple, pair, nothing, many = strategy.prepare(
        (model, optimizer, None), (model, optimizer), (None, None, None), [TinyModel(), TinyModel()]
    )
    assert isinstance(triple, PreparedModel)
    assert pair == (model, optimizer)
    assert nothing == (None, None, None)
    assert len(many) == 2
    with pytest.raises(TypeError, match="int"):
        strategy.prepare(3)


def test_bf16_computes_in_bf16_and_keeps_float32_weights():
    strategy = strategy_with(bf16=True)
    ready = prepared(strategy)
    assert ready.model(batch(2)[0]).dtype == torch.bfloat16
    assert {p.dtype for p in ready.model.parameters()} == {torch.float32}
    train_step(strategy, ready, *batch(2))
    frozen = strategy.prepare_model(TinyModel())
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16}


def test_strict_loading_is_honoured(tmp_path):
    strategy = strategy_with()
    strategy.save_ckpt(TinyModel(), str(tmp_path))
    bigger = TinyModel()
    bigger.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="extra"):
        strategy.load_ckpt(bigger, str(tmp_path))
    strategy.load_ckpt(bigger, str(tmp_path), load_module_strict=False)


def test_seed_makes_all_generators_repeat():
    import random

    import numpy as np

    strategy = strategy_with()
    drawn = []
    for _ in range(2):
        strategy.set_seed(3)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))  # noqa: NPY002
    assert drawn[0] == drawn[1]


def test_options_without_effect_warn_or_with_strict_fail(capsys):
    strategy_with(use_mp_opt=True)
    assert "use_mp_opt acts only with fsdp" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="use_mp_opt"):
        strategy_with(use_mp_opt=True, strict=True)


class SmallCritic(nn.Module):
    """A trunk and a head, as critics have them."""

    def __init__(self, seed):
        super().__init__()
        self.trunk = tiny_model("llama", seed=seed)
        self.value_head = nn.Linear(64, 1)


def test_a_saved_critic_is_a_hugging_face_checkpoint(tmp_path):
    strategy = strategy_with()
    saved, loaded = SmallCritic(0), SmallCritic(1)
    assert not torch.equal(weights(saved), weights(loaded))
    strategy.save_model(saved, None, str(tmp_path))
    strategy.load_model(loaded, str(tmp_path))
    assert torch.equal(weights(saved), weights(loaded))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(weights(plain), weights(saved.trunk))


def test_load_model_is_strict_about_names(tmp_path):
    strategy = strategy_with()
    strategy.save_model(TinyModel(), None, str(tmp_path))
    bigger = TinyModel(1)
    bigger.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"extra\.bias"):
        strategy.load_model(bigger, str(tmp_path))
    with pytest.raises(FileNotFoundError):
        strategy.load_model(bigger, str(tmp_path / "none"))
    strategy.load_model(bigger, str(tmp_path), strict=False)
    assert torch.equal(bigger.layers[0].weight, TinyModel(0).layers[0].weight)

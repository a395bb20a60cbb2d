from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightrft.strategy import FakeStrategy, PreparedModel, get_fake_strategy
from lightrft.strategy.config import ConfigError


class TinyModel(nn.Module):
    """One hidden layer; deterministic given the seed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs):
        return self.layers(inputs)


def batch(num_rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, 4, generator=generator), torch.randn(
        num_rows, 3, generator=generator
    )


def prepared(strategy: FakeStrategy, seed: int = 0, max_steps: int = 20) -> PreparedModel:
    actor, *_ = strategy.prepare_models_and_optimizers(
        TinyModel(seed), None, None, None, None, max_steps
    )
    return actor


def strategy_with(**settings) -> FakeStrategy:
    return get_fake_strategy({"actor_learning_rate": 1e-2, "train_batch_size": 1, **settings})


def train_step(strategy, ready, inputs, targets, name="actor"):
    loss = (ready.model(inputs) - targets).square().mean()
    strategy.backward(loss, ready, ready.optimizer)
    return strategy.optimizer_step(ready.optimizer, ready, ready.scheduler, name=name)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_usage_of_the_design_document(tmp_path):
    strategy = get_fake_strategy()
    strategy.setup_distributed()
    model = TinyModel()
    optimizer = strategy.create_optimizer(model, lr=0.1)
    before = weights(model)
    strategy.backward(model(batch(2)[0]).square().mean(), model, optimizer)
    strategy.optimizer_step(optimizer, model, None)
    assert not torch.equal(weights(model), before)
    strategy.save_ckpt(model, str(tmp_path / "checkpoints"))


def test_construction_needs_no_process_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with get_fake_strategy() as strategy:
        assert (strategy.world_size, strategy.get_rank(), strategy.is_rank_0()) == (1, 0, True)
        assert strategy.accumulated_gradient == 1
        assert not torch.distributed.is_initialized()


def test_order_of_construction_is_the_published_one():
    calls = []

    class Watched(FakeStrategy):
        def setup_distributed(self, timeout=None, num_gpu_per_node=None):
            calls.append((timeout.total_seconds(), hasattr(self, "sp_data_processor")))
            super().setup_distributed(timeout, num_gpu_per_node)

    args = {"adam_offload": True, "zpg": 2, "overlap_comm": True}
    strategy = Watched(1, 2.0, 1, 1, args)
    assert calls == [(3600.0, False)]
    assert strategy.args is args
    assert (strategy.adam_offload, strategy.zpg, strategy.overlap_comm) == (True, 2, True)
    # `_profile_step` is published by seed 004.
    assert (strategy.time_steps["x"], strategy._profile_step) == (0, 0)
    assert strategy.inference_engine is None
    assert strategy.inference_engine_status.name == "SLEEPED"


def test_accumulation_equals_one_step_on_the_whole_batch():
    inputs, targets = batch(8)
    whole = strategy_with()
    reference = prepared(whole)
    parts = strategy_with(train_batch_size=4)
    ready = prepared(parts)
    for _ in range(3):
        train_step(whole, reference, inputs, targets)
        results = [
            train_step(parts, ready, inputs[i : i + 2], targets[i : i + 2]) for i in (0, 2, 4, 6)
        ]
        assert [r is None for r in results] == [True, True, True, False]
    torch.testing.assert_close(weights(ready.model), weights(reference.model))


def test_shares_of_unequal_micro_batches_equal_the_whole_batch():
    inputs, targets = batch(8)
    reference_strategy, strategy = strategy_with(), strategy_with(train_batch_size=64)
    reference, ready = prepared(reference_strategy), prepared(strategy)
    for sizes in ([3, 5], [1, 1, 6], [8]):
        train_step(reference_strategy, reference, inputs, targets)
        start = 0
        with strategy.accumulation(len(sizes), ready.optimizer):
            for size in sizes:
                rows = slice(start, start + size)
                loss = (ready.model(inputs[rows]) - targets[rows]).square().sum() / targets.numel()
                strategy.backward(loss, ready, ready.optimizer)
                result = strategy.optimizer_step(ready.optimizer, ready, ready.scheduler)
                start += size
                assert (result is None) == (start < 8)
    torch.testing.assert_close(weights(ready.model), weights(reference.model))


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


def test_max_norm_zero_keeps_gradients():
    strategy = strategy_with(max_norm=0.0, lr_warmup_ratio=0.0)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = copy.deepcopy(model)
    inputs, targets = batch(4)
    (expected(inputs) - 50 * targets).square().mean().backward()
    ready = PreparedModel(model, optimizer, None)
    result = train_step(strategy, ready, inputs, 50 * targets)
    gradient = torch.cat([p.grad.reshape(-1) for p in expected.parameters()])
    torch.testing.assert_close(weights(model), weights(expected) - gradient)
    assert result.grad_norm == pytest.approx(gradient.norm().item())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_gradients_skip_the_step_and_are_counted(bad):
    strategy = strategy_with()
    ready = prepared(strategy)
    inputs, targets = batch(4)
    train_step(strategy, ready, inputs, targets)
    before, rate = weights(ready.model), ready.optimizer.param_groups[0]["lr"]
    result = train_step(strategy, ready, inputs * bad, targets)
    assert result.is_skipped
    assert strategy.num_skipped_steps == {"actor": 1}
    assert torch.equal(weights(ready.model), before)
    assert ready.optimizer.param_groups[0]["lr"] == rate
    assert all(p.grad is None for p in ready.model.parameters())
    assert not train_step(strategy, ready, inputs, targets).is_skipped


def test_prepare_models_and_optimizers_returns_four_items():
    strategy = strategy_with(critic_learning_rate=3e-2, lr_warmup_ratio=0.0)
    actor, critic, rewards, initial = strategy.prepare_models_and_optimizers(
        TinyModel(0), TinyModel(1), [TinyModel(2), TinyModel(3)], TinyModel(4), None, 10
    )
    assert actor.model.is_actor is True
    assert actor.optimizer.param_groups[0]["lr"] == 1e-2
    assert critic.optimizer.param_groups[0]["lr"] == 3e-2
    assert [p.requires_grad for r in rewards for p in r.parameters()] == [False] * 8
    assert not initial.training
    single = TinyModel(2)
    actor, critic, rewards, initial = strategy.prepare_models_and_optimizers(
        TinyModel(0), None, single, None, None, 10
    )
    assert critic == (None, None, None)
    assert (rewards, initial) == (single, None)
    assert not any(p.requires_grad for p in single.parameters())


def test_remote_rewards_leave_reward_models_alone():
    strategy = strategy_with(remote_rm_url="http://host/score")
    reward = TinyModel(2)
    strategy.prepare_models_and_optimizers(TinyModel(0), None, reward, None, None, 10)
    assert all(p.requires_grad for p in reward.parameters())


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


def test_prepare_reward_model_takes_settings_of_its_own():
    strategy = strategy_with()
    ready = strategy.prepare_reward_model(
        TinyModel(), {"actor_learning_rate": 0.5, "lr_warmup_ratio": 0.0}, 10
    )
    assert ready.optimizer.param_groups[0]["lr"] == 0.5
    assert ready.model.training


@pytest.mark.parametrize("size", [-1, 1, 8])
def test_any_shard_size_works_on_one_rank(size):
    strategy_with().prepare_model(TinyModel(), shard_size=size)


def test_bf16_computes_in_bf16_and_keeps_float32_weights():
    strategy = strategy_with(bf16=True)
    ready = prepared(strategy)
    assert ready.model(batch(2)[0]).dtype == torch.bfloat16
    assert {p.dtype for p in ready.model.parameters()} == {torch.float32}
    train_step(strategy, ready, *batch(2))
    frozen = strategy.prepare_model(TinyModel())
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16}


def test_checkpoint_continues_bit_for_bit(tmp_path):
    inputs, targets = batch(4)
    strategy = strategy_with()
    ready = prepared(strategy)
    for _ in range(3):
        train_step(strategy, ready, inputs, targets)
    strategy.save_ckpt(ready, str(tmp_path), client_state={"step": 3, "kl": 0.25})
    expected_noise = torch.randn(3)
    for _ in range(3):
        train_step(strategy, ready, inputs, targets)
    other_strategy = strategy_with()
    other = prepared(other_strategy, seed=9)
    path, state = other_strategy.load_ckpt(other.model, str(tmp_path))
    assert state == {"step": 3, "kl": 0.25}
    assert path.startswith(str(tmp_path))
    assert torch.equal(torch.randn(3), expected_noise)
    for _ in range(3):
        train_step(other_strategy, other, inputs, targets)
    assert torch.equal(weights(other.model), weights(ready.model))
    assert other.scheduler.get_last_lr() == ready.scheduler.get_last_lr()


def test_module_only_load_leaves_the_optimizer_alone(tmp_path):
    strategy = strategy_with()
    ready = prepared(strategy)
    train_step(strategy, ready, *batch(4))
    strategy.save_ckpt(ready, str(tmp_path), tag="one")
    fresh = prepared(strategy, seed=3)
    strategy.load_ckpt(fresh, str(tmp_path), tag="one", load_module_only=True)
    assert torch.equal(weights(fresh.model), weights(ready.model))
    assert not fresh.optimizer.state_dict()["state"]
    with pytest.raises(FileNotFoundError):
        strategy.load_ckpt(fresh, str(tmp_path), tag="two")


def test_strict_loading_is_honoured(tmp_path):
    strategy = strategy_with()
    strategy.save_ckpt(TinyModel(), str(tmp_path))
    bigger = TinyModel()
    bigger.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="extra"):
        strategy.load_ckpt(bigger, str(tmp_path))
    strategy.load_ckpt(bigger, str(tmp_path), load_module_strict=False)


def test_save_and_load_model_round_trip_with_tied_weights(tmp_path):
    strategy = strategy_with()
    models = [TinyModel(seed) for seed in (0, 1)]
    for model in models:
        model.twin = nn.Linear(4, 8)
        model.twin.weight = model.layers[0].weight
    strategy.save_model(models[0], None, str(tmp_path))
    strategy.load_model(models[1], str(tmp_path))
    assert torch.equal(weights(models[0]), weights(models[1]))
    with pytest.raises(FileNotFoundError):
        strategy.load_model(models[1], str(tmp_path / "none"))


def test_moving_average():
    strategy = strategy_with()
    model, average = TinyModel(0), TinyModel(1)
    expected = 0.9 * weights(average) + 0.1 * weights(model)
    strategy.moving_average(model, average, beta=0.9)
    torch.testing.assert_close(weights(average), expected)
    with pytest.raises(ValueError, match="must have the same parameters"):
        strategy.moving_average(model, nn.Linear(2, 2))


def test_memory_aids_return_what_they_got():
    strategy = strategy_with()
    model = TinyModel()
    optimizer = strategy.create_optimizer(model)
    assert strategy.maybe_offload_optimizer(optimizer) is optimizer
    assert strategy.maybe_load_optimizer(optimizer) is optimizer
    assert strategy.reload_model(strategy.offload_model(model)) is model
    for meta_init in (True, False):  # one process has nobody to share the loading with
        with strategy.init_model_context(meta_init=meta_init):
            assert not nn.Linear(2, 2).weight.is_meta
    report = strategy.report_memory("here")
    assert 0 < report.allocated_bytes < report.total_bytes


def test_seed_makes_all_generators_repeat():
    import random

    import numpy as np

    strategy = strategy_with()
    drawn = []
    for _ in range(2):
        strategy.set_seed(3)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))  # noqa: NPY002
    assert drawn[0] == drawn[1]


def test_setup_dataloader_resumes_after_consumed_samples():
    strategy = strategy_with(seed=5)
    data = list(range(10))
    whole = [x for b in strategy.setup_dataloader(data, 2) for x in b.tolist()]
    rest = [x for b in strategy.setup_dataloader(data, 2, consumed_samples=4) for x in b.tolist()]
    assert sorted(whole) == data
    assert rest == whole[4:]
    ordered = strategy.setup_dataloader(data, 4, shuffle=False, drop_last=False, collate_fn=list)
    assert list(ordered) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_options_without_effect_warn_or_with_strict_fail(capsys):
    strategy_with(use_mp_opt=True)
    assert "use_mp_opt acts only with fsdp" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="use_mp_opt"):
        strategy_with(use_mp_opt=True, strict=True)


def test_batch_sizes_that_do_not_fit_show_numbers_and_remedy():
    with pytest.raises(ValueError, match="Nearest legal train_batch_size: 3 or 6") as caught:
        get_fake_strategy({"train_batch_size": 5, "micro_train_batch_size": 3})
    assert all(text in str(caught.value) for text in ("train_batch_size: 5", "world_size: 1"))


def test_misspelt_options_are_refused():
    strategy = strategy_with()
    ready = prepared(strategy)
    with pytest.raises(TypeError, match="retain"):
        strategy.backward(torch.ones(()), ready, ready.optimizer, retain=True)
    with pytest.raises(TypeError, match="learning_rate"):
        strategy.create_optimizer(ready.model, learning_rate=1.0)


class Wrapper(nn.Module):
    """An actor (child `model`) or a critic (child `trunk` and a head) around a small Llama."""

    def __init__(self, kind: str, seed: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
        config = LlamaConfig(
            vocab_size=50, num_hidden_layers=1, tie_word_embeddings=kind == "model", **sizes
        )
        setattr(self, kind, LlamaForCausalLM(config))
        if kind == "trunk":
            self.value_head = nn.Linear(32, 1)


@pytest.mark.parametrize("kind", ["model", "trunk"])
def test_saved_models_are_hugging_face_checkpoints(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    strategy = strategy_with()
    saved, loaded = Wrapper(kind, 0), Wrapper(kind, 1)
    assert not torch.equal(weights(saved), weights(loaded))
    strategy.save_model(saved, None, str(tmp_path))
    strategy.load_model(loaded, str(tmp_path))
    assert torch.equal(weights(saved), weights(loaded))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(weights(plain), weights(saved.get_submodule(kind)))


def test_load_model_is_strict_about_names(tmp_path):
    strategy = strategy_with()
    strategy.save_model(TinyModel(), None, str(tmp_path))
    bigger = TinyModel(1)
    bigger.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"extra\.bias"):
        strategy.load_model(bigger, str(tmp_path))
    strategy.load_model(bigger, str(tmp_path), strict=False)
    assert torch.equal(bigger.layers[0].weight, TinyModel(0).layers[0].weight)

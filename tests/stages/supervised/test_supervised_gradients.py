"""The gradient of a supervised step is that of the formula, however the step is carried out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.tiny import tiny_model
from tests.ranks import run_multiprocess
from tests.stages.supervised.supervised_world import (
    RAGGED,
    STILL,
    build_stage,
    distance,
    row,
    slow_gradient,
    train_step,
)

from lightrft.algorithms.aggregation import local_normalizer, loss_weights
from lightrft.stages.supervised.supervised_stage import LOSSES, pad
from lightrft.strategy import get_fake_strategy

# Ways to carry out one step in one process.
WAYS = {
    "four rows": {"micro_train_batch_size": 4},
    "two rows, twice": {"micro_train_batch_size": 2},
    "packed": {"micro_train_batch_size": 4, "packing_samples": True, "max_row_tokens": 110},
    "packed, twice": {"packing_samples": True, "micro_batch_tokens": 120},
    "by tokens": {"micro_batch_tokens": 130},
    "unfused": {"micro_train_batch_size": 4, "fused_linear_logprob": False},
}


def one_row_per_pass():
    return train_step(build_stage(get_fake_strategy(STILL), RAGGED), RAGGED)


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    return one_row_per_pass()


def test_loss_and_gradient_are_those_of_the_formula_in_float64(plain):
    found, metrics = plain
    loss, gradient = slow_gradient(tiny_model(), RAGGED)
    prefixed = {f"model.{name}": value for name, value in gradient.items()}
    assert distance(found, prefixed) <= 1e-5
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert metrics["num_tokens"] == 232
    assert metrics["trained_share"] == pytest.approx(101 / 232)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_gradient(plain, way):
    found, metrics = train_step(build_stage(get_fake_strategy(STILL), RAGGED, **WAYS[way]), RAGGED)
    assert distance(found, plain[0]) <= 1e-6
    assert metrics["loss"] == pytest.approx(plain[1]["loss"], rel=1e-6)


@pytest.fixture(scope="module", params=["seq-mean-token-mean", "dft"])
def named(request):
    return request.param, slow_gradient(tiny_model(), RAGGED, request.param)


@pytest.mark.parametrize("way", ["four rows", "two rows, twice", "packed, twice", "unfused"])
def test_named_losses_are_those_of_their_formulas_in_float64(plain, named, way):
    name, (loss, gradient) = named
    stage = build_stage(get_fake_strategy(STILL), RAGGED, sft_loss=name, **WAYS[way])
    found, metrics = train_step(stage, RAGGED)
    prefixed = {f"model.{name}": value for name, value in gradient.items()}
    assert distance(found, prefixed) <= 1e-5
    assert distance(found, plain[0]) > 0.1
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["nll"] == pytest.approx(plain[1]["loss"], rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(plain[1]["perplexity"], rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_the_slope_of_a_loss_is_its_finite_difference_with_its_weights_held(name):
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 4, 5, generator=draw, dtype=torch.float64)
    direction = torch.randn(2, 4, 5, generator=draw, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]]).bool()
    found, mode = LOSSES[name], LOSSES[name].aggregation
    weights = loss_weights(mask, mode, dtype=torch.float64)

    def chosen(logits):
        return torch.where(mask, logits.log_softmax(-1)[..., 2], 0.0)

    held = chosen(logits).exp() if name == "dft" else torch.ones(2, 4, dtype=torch.float64)

    def value(step):
        moved = chosen(logits + step * direction)
        return (-moved * held * weights).sum() / local_normalizer(mask, mode)

    leaf = logits.clone().requires_grad_()
    loss = found.share(chosen(leaf), weights, local_normalizer(mask, mode))
    loss.backward()
    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    assert loss.item() == pytest.approx(float(value(0.0)), rel=1e-12)
    assert float((leaf.grad * direction).sum()) == pytest.approx(float(slope), rel=1e-8)


def test_a_mean_of_row_means_would_be_found(plain):
    means = [train_step(build_stage(get_fake_strategy(STILL), [r]), [r])[0] for r in RAGGED[::3]]
    mean = {name: (means[0][name] + means[1][name]) / 2 for name in means[0]}
    assert distance(mean, plain[0]) > 0.1


def test_a_step_without_trained_tokens_has_loss_and_gradient_0():
    found, metrics = train_step(build_stage(get_fake_strategy(STILL), RAGGED[1:3]), RAGGED[1:3])
    assert all(not value.any() for value in found.values())
    assert metrics["loss"] == 0.0


def test_packed_rows_do_not_see_each_other():
    rows = (row(40, 39), row(30, 20, seed=1))
    stage = build_stage(get_fake_strategy(STILL), rows, packing_samples=True)
    changed = replace(rows[0], token_ids=np.flip(rows[0].token_ids).copy())
    with torch.no_grad():
        before = stage._score(pad(rows, stage.strategy.device)).logprobs
        after = stage._score(pad((changed, rows[1]), stage.strategy.device)).logprobs
    assert (before[0] - after[0]).abs().max() > 0.1
    assert (before[1] - after[1]).abs().max() <= 1e-6


def in_ranks(rank, world_size, changes):
    from datetime import timedelta

    import torch.distributed as dist

    from lightrft.strategy import get_strategy

    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    torch.set_num_threads(1)
    strategy = get_strategy({**STILL, "fsdp": True, "sp_size": changes.get("sp_size", 1)})
    stage = build_stage(strategy, RAGGED, **changes)
    batch = stage.batch_of(RAGGED, 1)
    own = [batch.rows[i].num_trained for i in batch.plan.row_index(strategy.data_rank)]
    gradient, metrics = train_step(stage, RAGGED)
    return sum(own), {n: v.numpy() for n, v in gradient.items()}, metrics


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "way",
    [
        {},
        {"packing_samples": True},
        {"sp_size": 2},
        {"sp_size": 2, "sft_loss": "seq-mean-token-mean"},
        {"sft_loss": "dft"},
    ],
)
def test_two_ranks_of_which_one_trains_no_token_give_the_same_gradient(plain, way):
    results = run_multiprocess(in_ranks, 2, timeout_seconds=300, args=(way,))
    expected = [101, 101] if "sp_size" in way else [101, 0]
    assert [count for count, _, _ in results] == expected
    wanted, loss = plain[0], plain[1]["loss"]
    if "sft_loss" in way:
        loss, gradient = slow_gradient(tiny_model(), RAGGED, way["sft_loss"])
        wanted = {f"model.{name}": value for name, value in gradient.items()}
    for _, gradient, metrics in results:
        found = {name: torch.from_numpy(value) for name, value in gradient.items()}
        assert distance(found, wanted) <= (1e-5 if "sft_loss" in way else 1e-6)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
        assert metrics["trained_share"] == plain[1]["trained_share"]

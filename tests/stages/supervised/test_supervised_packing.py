"""Packed micro-batches: nothing is padded, and rows fill them as well as they can."""

import numpy as np
import pytest
from tests.stages.stage_world import STILL, row
from tests.stages.supervised.supervised_world import build_stage

from lightrft.config import TrainConfig
from lightrft.experience.minibatches import MinibatchPlan
from lightrft.stages.rows.row_passes import best_fit
from lightrft.stages.stage import Step
from lightrft.strategy import get_fake_strategy

LONGEST = 512


def drawn_lengths(kind, number, draw):
    if kind == "even":
        return draw.integers(8, LONGEST + 1, number)
    if kind == "uneven":
        return np.clip(draw.lognormal(4.1, 0.8, number), 8, LONGEST).astype(int)
    return np.where(draw.random(number) < 0.8, draw.integers(8, 50, number), LONGEST - 50)


def slow_packs(lengths, max_tokens):
    """Best-fit decreasing, as it is told."""
    packs = []
    for length in sorted(lengths, reverse=True):
        fits = [pack for pack in packs if sum(pack) + length <= max_tokens]
        if fits:
            max(fits, key=sum).append(length)
        else:
            packs.append([length])
    return packs


def cut(order, lengths, max_tokens):
    config = TrainConfig(packing_samples=True, micro_batch_tokens=max_tokens)
    plan = MinibatchPlan(((tuple(order),),))
    slices = plan.micro_slices(lengths, index=0, rank=0, micro_batch_size=1, config=config)
    return [[int(lengths[place]) for place in order[part]] for part in slices]


@pytest.mark.parametrize("kind", ["even", "uneven", "two lengths"])
@pytest.mark.parametrize("num_longest", [1, 4])
def test_rows_of_a_step_fill_passes_by_best_fit(kind, num_longest):
    draw, max_tokens = np.random.default_rng(1), num_longest * LONGEST
    for _ in range(20):
        lengths = drawn_lengths(kind, 64, draw)
        places = draw.permutation(64).tolist()
        order = best_fit(places, lengths.tolist(), max_tokens)
        assert sorted(order) == sorted(places)
        assert cut(order, lengths, max_tokens) == slow_packs(lengths.tolist(), max_tokens)


def test_a_row_longer_than_a_pack_stands_alone():
    assert cut(best_fit([2, 0, 1], [3, 20, 4], 10), [3, 20, 4], 10) == [[20], [4, 3]]


@pytest.mark.parametrize("packs, padded", [(True, 0), (False, 42)])
def test_the_model_sees_the_tokens_of_the_rows_and_no_padding(packs, padded):
    rows = tuple(row(length, length // 2, seed=length) for length in (60, 33, 27, 12))
    how = {"packing_samples": packs, "max_row_tokens": 60}
    stage = build_stage(get_fake_strategy(STILL), rows, micro_train_batch_size=2, **how)
    seen = []
    embedding = stage.models.main.model.model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, given, __: seen.append(given[0].numel()))
    stage.update(stage.batch_of(rows, 1), Step(1))
    assert sum(seen) == 132 + padded

"""Orders of rows: against torch's own sampler, by enumeration, and resumed anywhere."""

import json
from itertools import pairwise, permutations
from types import SimpleNamespace

import numpy as np
import pytest

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.registry import PROMPT_SAMPLERS
from lightrft.datasets.batch_stream import open_stream
from lightrft.datasets.prompt_sampler import (
    Drawn,
    RowChoice,
    SampledRows,
    build_sampler,
    probabilities_of,
    weight_of,
)
from lightrft.datasets.types import DataError, Prompt
from lightrft.strategy.sampler import DistributedSampler


class Ranks:
    """This rank among some; the others draw alike."""

    def __init__(self, rank=0, world_size=1):
        self.rank, self.world_size = rank, world_size

    def gather_objects(self, item):
        return [item] * self.world_size

    def print(self, text):
        print(text)


OPTIONS = {
    "shuffle": {},
    "in_order": {"shuffle": False},
    "weighted": {"prompt_weight": "w"},
}


def opened(num_rows, size, at=None, *, rank=0, world_size=1, items=None, **options):
    """The stream of rows, from a position on."""
    weights = np.arange(1.0, num_rows + 1) / np.arange(1.0, num_rows + 1).sum()
    choice = RowChoice(num_rows, 7, size, weights=weights)
    config = TrainConfig(seed=7, **options)
    rows = SampledRows(items or range(num_rows), config, choice, Ranks(rank, world_size))
    return open_stream(rows, world_size=world_size, **at or {})


def position(stream):
    names = ("episode", "num_consumed", "sampler_state")
    return {name: getattr(stream, name) for name in names}


def places(stream, count):
    return [[each.place for each in stream.next_draw()] for _ in range(count)]


@pytest.mark.parametrize("num_rows", [12, 13, 15])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shuffling_is_that_of_torch_on_any_number_of_ranks(num_rows, world_size):
    per_pass = num_rows // 4
    for rank in range(world_size):
        sampler = DistributedSampler(range(num_rows), world_size, rank, seed=7, drop_last=True)
        stream = opened(num_rows, 4, rank=rank, world_size=world_size)
        for episode in range(3):
            sampler.set_epoch(episode)
            order, share = list(sampler), 4 // world_size
            for step in range(per_pass):
                expected = order[step * share : (step + 1) * share]
                assert stream.next_batch() == expected
            assert (stream.episode, stream.num_consumed) == (episode, 4 * per_pass)


def test_in_order_is_the_order_of_the_data():
    stream = opened(10, 4, shuffle=False)
    assert places(stream, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("stop_after", range(6))
def test_an_order_goes_on_anywhere(name, stop_after):
    whole = places(opened(11, 4, **OPTIONS[name]), 9)
    first = opened(11, 4, **OPTIONS[name])
    seen = places(first, stop_after)
    second = opened(11, 4, position(first), **OPTIONS[name])
    assert seen + places(second, 9 - stop_after) == whole
    assert len({tuple(each) for each in whole}) > 1


@pytest.mark.parametrize("name", ["shuffle", "in_order"])
def test_a_position_of_an_older_checkpoint_is_enough(name):
    whole = places(opened(11, 4, **OPTIONS[name]), 9)
    stream = opened(11, 4, {"episode": 2, "num_consumed": 4}, **OPTIONS[name])
    assert places(stream, 4) == whole[5:]


def test_another_order_begins_at_the_position_of_the_run():
    first = opened(11, 4, prompt_weight="w")
    places(first, 3)
    assert places(opened(11, 4, position(first)), 1) == places(opened(11, 4), 4)[3:]


def test_a_state_of_places_among_other_rows_is_left_behind(capsys):
    stream, anew = (opened(num_rows, 4, prompt_weight="w") for num_rows in (11, 10))
    places(stream, 2)
    state = {"sampler_state": stream.sampler_state}
    resumed = opened(10, 4, state, prompt_weight="w")
    assert "begins anew: the checkpoint has a state of ['weighted', 11]" in capsys.readouterr().out
    assert places(resumed, 2) == places(anew, 2)


def test_each_row_is_drawn_in_proportion_to_its_weight(monkeypatch):
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    choice = RowChoice(4, 0, 3)
    for order in permutations(range(4)):
        # A turn in the middle of each piece between two borders.
        borders = sorted({float(x % 1) for x in 3 * np.cumsum(probabilities[list(order)])} | {0, 1})
        drawn = np.zeros(4)
        for start, stop in pairwise(borders):
            turn = (start + stop) / 2
            numbers = SimpleNamespace(
                permutation=lambda _, order=order: np.array(order),
                random=lambda turn=turn: turn,
            )
            monkeypatch.setattr(RowChoice, "generator", lambda *_, numbers=numbers: numbers)
            each = [d.place for d in choice.draw_by(probabilities, 3, 0)]
            counts = np.bincount(each, minlength=4)
            assert (np.abs(counts - 3 * probabilities) < 1).all()
            drawn += (stop - start) * counts
        assert drawn == pytest.approx(3 * probabilities, abs=1e-12)


def test_a_turn_that_rounds_to_a_whole_one_draws_the_last_row_with_a_weight(monkeypatch):
    numbers = SimpleNamespace(permutation=np.arange, random=lambda: 1.0)
    monkeypatch.setattr(RowChoice, "generator", lambda *_: numbers)
    drawn = RowChoice(3, 0, 2).draw_by(np.array([0.5, 0.5, 0.0]), 2, 0)
    assert [each.place for each in drawn] == [1, 1]


def test_the_probability_of_a_draw_is_its_share():
    stream = opened(4, 3, prompt_weight="w")
    assert set(stream.next_draw()) <= {Drawn(place, (place + 1) / 10) for place in range(4)}
    prompts = [Prompt(5 + i, "", (i,)) for i in range(4)]
    marked = opened(4, 2, items=prompts).next_batch()
    assert [each.draw_probability for each in marked] == [0.25, 0.25]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"shuffle": False, "prompt_weight": "w"}, "has no meaning with the order in_order"),
        ({"shuffle": False, "prompt_sampler": "weighted"}, "leave one out"),
        ({"prompt_sampler": "shuffle", "prompt_weight": "w"}, "has no meaning with the order"),
        ({"prompt_sampler": "shufle"}, "shuffle"),
    ],
)
def test_orders_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**options)


def test_a_weighted_order_needs_weights():
    with pytest.raises(ConfigError, match="name their column by prompt_weight"):
        build_sampler(TrainConfig(prompt_sampler="weighted"), RowChoice(4, 0, 2))


@pytest.mark.parametrize("value", [None, "much", -1, float("inf"), float("nan"), True])
def test_a_weight_that_is_none_is_named(value):
    row = SimpleNamespace(columns={"w": value}, location="rows.jsonl:3")
    with pytest.raises(DataError, match=r"rows\.jsonl:3: column 'w' must hold a weight"):
        weight_of(row, TrainConfig(prompt_weight="w"))
    with pytest.raises(DataError, match="no column 'v' for the weight, found 'w'"):
        weight_of(row, TrainConfig(prompt_weight="v"))


def test_weights_of_zero_alone_are_refused():
    with pytest.raises(DataError, match="none could be drawn"):
        probabilities_of([0.0, 0.0], TrainConfig(prompt_weight="w", prompt_data="rows.jsonl"))


@pytest.mark.parametrize("name", PROMPT_SAMPLERS)
def test_states_are_json_and_states_of_equal_runs_are_equal(name):
    config = TrainConfig(prompt_sampler=name, prompt_weight="w" if name == "weighted" else None)
    choice = RowChoice(9, 3, 4, has_rewards=True, weights=np.full(9, 1 / 9))
    one, other = (build_sampler(config, choice) for _ in range(2))
    for _ in range(5):
        assert one.draw(4) == other.draw(4)
        assert json.dumps(one.state) == json.dumps(other.state)

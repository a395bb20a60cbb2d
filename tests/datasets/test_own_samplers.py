"""Samplers of one's own: what breaks the contract is named before it decides anything."""

import random
from contextlib import ExitStack

import pytest

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.registry import PROMPT_SAMPLERS
from lightrft.datasets.batch_stream import open_stream
from lightrft.datasets.prompt_sampler import (
    Drawn,
    GroupResult,
    RowChoice,
    SampledRows,
    build_sampler,
)
from lightrft.datasets.types import Prompt


class Ranks:
    rank, world_size = 0, 2

    def __init__(self, others=lambda item: item):
        self._others = others

    def gather_objects(self, item):
        return [item, self._others(item)]


class Sampler:
    """A right one: every other row, and from the first low reward on the same again."""

    def __init__(self, rows, *, stride: int = 2):
        self.rows, self.stride, self.state = rows, stride, {"at": 0}

    def draw(self, n):
        first = self.state["at"]
        self.state["at"] += self.stride * n
        return [(first + self.stride * i) % self.rows.num_rows for i in range(n)]

    def observe(self, results):
        if any(min(each.rewards) < 0 for each in results):
            self.state["at"] = 0


def drawing(draw):
    return type("Drawing", (Sampler,), {"draw": draw})


class Unsavable(Sampler):
    def __init__(self, rows):
        super().__init__(rows)
        self.state = {"seen": {1, 2}}


class NotFinite(Sampler):
    def draw(self, n):
        self.state["mean"] = float("nan")
        return range(n)


class Forgets(Sampler):
    def __init__(self, rows):
        super().__init__(rows)
        self.position = 0

    def draw(self, n):
        self.position += n
        return [(self.position + i) % self.rows.num_rows for i in range(n)]


class Half:
    def __init__(self, rows):
        self.state = {}

    def draw(self, n):
        return range(n)


class Fails(Sampler):
    def __init__(self, rows):
        raise KeyError("level")


def opened(*, ranks=None, items=None, needs_probabilities=False, at=None, **options):
    config = TrainConfig(prompt_sampler="own", **options)
    choice = RowChoice(12, 3, 4, has_rewards=True, needs_probabilities=needs_probabilities)
    rows = SampledRows(items or range(12), config, choice, ranks or Ranks())
    return open_stream(rows, world_size=2, **at or {})


@pytest.fixture
def lent():
    def lend(sampler):
        names.enter_context(PROMPT_SAMPLERS.lent({"own": sampler}))

    with ExitStack() as names:
        yield lend


@pytest.mark.parametrize(
    "sampler, message",
    [
        (
            drawing(lambda self, n: [12] * n),
            "prompt_sampler own drew the place 12: expected 4 places from 0 to 11",
        ),
        (
            drawing(lambda self, n: range(n - 1)),
            "prompt_sampler own drew 3 rows: expected 4 places",
        ),
        (
            drawing(lambda self, n: ["first"] * n),
            "prompt_sampler own drew 'first': expected the place of a row",
        ),
        (Unsavable, "its state cannot be saved: .* set .*keep numbers, texts"),
        (NotFinite, "its state cannot be saved"),
        (Forgets, "draws other rows once it is restored from its state"),
        (
            drawing(lambda self, n: random.choices(range(12), k=n)),
            "draws other rows once it is restored from its state",
        ),
        (drawing(lambda self, n: [Drawn(0, 1.5)] * n), "gave the probability 1.5 for a draw"),
        (Half, "prompt_sampler own has no observe: expected state, draw"),
        (Fails, "prompt_sampler own: KeyError: 'level'; it is built of the rows"),
        (3, "prompt_sampler own: expected a class, got int"),
    ],
)
def test_a_wrong_sampler_is_named(lent, sampler, message):
    lent(sampler)
    with pytest.raises(ConfigError, match=message) as caught:
        stream = opened()
        for _ in range(3):
            stream.next_draw()
            assert stream.sampler_state
    assert len(str(caught.value).splitlines()) == 1


def likely(drawn):
    return [each._replace(probability=0.5) for each in drawn]


@pytest.mark.parametrize("others", [lambda drawn: drawn[::-1], likely])
def test_ranks_that_draw_other_rows_are_named(lent, others):
    lent(Sampler)
    with pytest.raises(ConfigError, match="draws other rows on rank 1 than on rank 0"):
        opened(ranks=Ranks(others)).next_draw()


def test_a_sampler_sees_results_and_goes_on_from_its_state(lent):
    lent(Sampler)
    first = opened(prompt_sampler_args={"stride": 1})
    assert [each.place for each in first.next_draw()] == [0, 1, 2, 3]
    first.observe([GroupResult(0, (1.0, 0.0))])
    position = {"num_consumed": 4, "sampler_state": first.sampler_state}
    second = opened(prompt_sampler_args={"stride": 1}, at=position)
    for stream in (first, second):
        assert [each.place for each in stream.next_draw()] == [4, 5, 6, 7]
        stream.observe([GroupResult(4, (1.0, -1.0))])
        assert [each.place for each in stream.next_draw()] == [0, 1, 2, 3]


def test_results_of_prompts_come_by_place_whatever_their_ids(lent):
    seen = []

    class Watches(Sampler):
        def observe(self, results):
            seen.extend(each.place for each in results)

    lent(Watches)
    prompts = [Prompt(100 + 2 * i, "", (i,)) for i in range(12)]
    stream = opened(items=prompts)
    assert [each.id for each in stream.next_batch()] == [100, 108]
    stream.observe([GroupResult(104), GroupResult(7), GroupResult(100)])
    assert seen == [2, 0]


def test_importance_weights_need_probabilities(lent):
    lent(Sampler)
    prompts = [Prompt(i, "", (i,)) for i in range(12)]
    stream = opened(items=prompts, needs_probabilities=True)
    with pytest.raises(ConfigError, match="does not say how likely its draws are"):
        stream.next_batch()


def test_hyper_parameters_are_keywords(lent):
    lent(Sampler)
    config = TrainConfig(prompt_sampler="own", prompt_sampler_args={"strides": 3})
    with pytest.raises(ConfigError, match="no option 'strides'; did you mean stride"):
        build_sampler(config, RowChoice(4, 0, 2))


def test_a_file_is_a_sampler(tmp_path):
    text = """
class Backwards:
    def __init__(self, rows):
        self.rows, self.state = rows, {"left": rows.num_rows}

    def draw(self, n):
        self.state["left"] -= n
        return range(self.state["left"] + n - 1, self.state["left"] - 1, -1)

    def observe(self, results):
        pass
"""
    path = tmp_path / "mine.py"
    path.write_text(text)
    config = TrainConfig(prompt_sampler=f"{path}:Backwards")
    stream = open_stream(SampledRows(range(8), config, RowChoice(8, 0, 4), Ranks()), world_size=2)
    assert [[d.place for d in stream.next_draw()] for _ in range(2)] == [[7, 6, 5, 4], [3, 2, 1, 0]]
    with pytest.raises(ConfigError, match="has no 'Forwards'"):
        build_sampler(TrainConfig(prompt_sampler=f"{path}:Forwards"), RowChoice(8, 0, 4))

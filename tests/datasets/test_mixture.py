"""Several sources as one list: proportions, determinism, and positions that can be resumed."""

import pytest

from lightrft.config import TrainConfig
from lightrft.config.parts.data import split_sources
from lightrft.datasets import DataError, load_prompts, read_sources
from lightrft.datasets.files import mixture_order
from lightrft.strategy.sampler import DistributedSampler


@pytest.fixture
def sources(write):
    """Two files, of 100 and 60 rows."""
    first = write("a.jsonl", [{"input": f"one {n}", "source": "a"} for n in range(100)])
    second = write("b.jsonl", [{"input": f"two {n}", "source": "b"} for n in range(60)])
    return f"{first}, {second}"


def names(rows):
    return [row.columns["source"] for row in rows]


def test_without_probabilities_sources_follow_one_another(sources):
    assert names(read_sources(sources)) == ["a"] * 100 + ["b"] * 60


def test_every_beginning_holds_the_shares_and_no_row_comes_twice(sources):
    rows = read_sources(sources, probabilities=(0.7, 0.3))
    mixed = names(rows)
    assert (mixed.count("a"), mixed.count("b")) == (100, 43)
    for length in range(1, len(mixed) + 1):
        assert abs(mixed[:length].count("a") - 0.7 * length) <= 1
    assert len({row.location for row in rows}) == len(rows)


def test_the_order_follows_from_the_seed_alone(sources):
    first, again, other = (
        [row.location for row in read_sources(sources, probabilities=(0.7, 0.3), seed=seed)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert set(first) != set(other)  # other rows of the source that is not used whole


@pytest.mark.parametrize(
    "sizes, shares, counts",
    [
        ((10, 10), (0.5, 0.5), (10, 10)),
        ((10, 1000), (0.1, 0.9), (10, 90)),
        ((3, 5, 7), (0.2, 0.3, 0.5), (3, 4, 7)),
        ((1, 1), (0.999, 0.001), (1, 0)),
    ],
)
def test_the_mixture_is_as_long_as_its_scarcest_source_allows(sizes, shares, counts):
    order = mixture_order(sizes, shares, seed=0)
    assert tuple(sum(s == source for s, _ in order) for source in range(len(sizes))) == counts
    assert len(set(order)) == len(order)


def test_a_run_that_is_resumed_in_the_middle_sees_the_other_prompts(sources, tokenizer):
    config = TrainConfig(seed=5)
    prompts, again = (
        load_prompts(sources, tokenizer, config, probabilities=(0.7, 0.3)) for _ in range(2)
    )
    assert [prompt.id for prompt in prompts] == list(range(143))
    assert prompts.report.summary().startswith(f"{sources}: 143 prompts")
    assert list(prompts) == list(again)
    whole, rest = (DistributedSampler(prompts, 2, 1, seed=5, drop_last=True) for _ in range(2))
    whole.set_epoch(3)
    rest.set_epoch(3, 40)
    assert list(whole)[20:] == list(rest)


@pytest.mark.parametrize(
    "shares, message",
    [
        ((0.7,), "one number per source of prompt_data: got 1 for 2"),
        ((0.7, 0.2), "positive with sum 1: got 0.7, 0.2"),
        ((1.5, -0.5), "positive with sum 1"),
    ],
)
def test_shares_that_do_not_fit_are_refused(sources, shares, message):
    with pytest.raises(DataError, match=message):
        read_sources(sources, probabilities=shares)


def test_a_path_with_a_comma_is_one_source(write):
    path = write("a,b.jsonl", [{"input": "x"}])
    assert split_sources(str(path)) == (str(path),)
    assert split_sources("a, b,") == ("a", "b")

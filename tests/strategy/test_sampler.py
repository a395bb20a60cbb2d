import pytest

from lightrft.strategy.sampler import DistributedSampler


def epoch(length, ranks, *, number=0, consumed=0, **options):
    samplers = [DistributedSampler(range(length), ranks, rank, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(number, consumed)
    own = [list(sampler) for sampler in samplers]
    assert [len(part) for part in own] == [len(sampler) for sampler in samplers]
    assert len({len(part) for part in own}) == 1
    return [index for step in zip(*own, strict=True) for index in step]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 7, 12])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_index_comes_once_or_is_padded_or_dropped(length, ranks, shuffle):
    dropped = epoch(length, ranks, shuffle=shuffle, drop_last=True)
    assert len(dropped) == len(set(dropped)) == length // ranks * ranks
    padded = epoch(length, ranks, shuffle=shuffle, drop_last=False)
    assert set(padded) == set(range(length))
    assert len(padded) == -(-length // ranks) * ranks
    assert max((padded.count(i) for i in padded), default=0) <= -(-len(padded) // max(1, length))


def test_order_depends_on_seed_and_epoch_only():
    assert epoch(20, 2, seed=1) == epoch(20, 2, seed=1)
    assert epoch(20, 2, seed=1) != epoch(20, 2, seed=2)
    assert epoch(20, 2, seed=1) != epoch(20, 2, seed=1, number=1)
    assert epoch(20, 1, seed=1) == epoch(20, 4, seed=1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("consumed", [0, 4, 8, 20])
def test_consumed_samples_are_exactly_the_first_ones(ranks, consumed):
    whole = epoch(20, ranks, number=3)
    assert epoch(20, ranks, number=3, consumed=consumed) == whole[consumed:]


@pytest.mark.parametrize("consumed", [-1, 11])
def test_consuming_more_than_an_epoch_is_an_error(consumed):
    with pytest.raises(ValueError, match="consumed_samples"):
        DistributedSampler(range(10), 2, 0, consumed_samples=consumed)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_must_exist(rank):
    with pytest.raises(ValueError, match="rank"):
        DistributedSampler(range(10), 2, rank)

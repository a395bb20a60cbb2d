"""Which batches of a run can be read without being used up."""

from itertools import count

from torch.utils.data import DataLoader, IterableDataset

from lightrft.datasets.batch_stream import known_items


class Endless(IterableDataset):
    def __iter__(self):
        return iter(count())


def test_a_loader_of_rows_has_them_all():
    assert list(known_items(DataLoader([3, 1, 2], batch_size=2, shuffle=True))) == [3, 1, 2]


def test_of_a_stream_of_rows_and_of_plain_batches_none_are_read():
    assert list(known_items(DataLoader(Endless()))) == []
    batches = iter([[1], [2]])
    assert list(known_items(batches)) == []
    assert next(batches) == [1]
    assert list(known_items(None)) == []

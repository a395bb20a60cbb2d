import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_multiprocess

from lightrft.strategy.distributed import collectives
from lightrft.strategy.distributed.collectives import (
    ALONE,
    all_gather,
    all_reduce,
    exchange_bytes,
    gather_bytes,
    gather_objects,
)
from lightrft.strategy.distributed.process_groups import start_process_group

pytestmark = pytest.mark.shard("strategies")

OPS = ("mean", "max", "sum")


def values_of(rank):
    """Signed values of every kind that differ between ranks."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "float": 0.1 * (rank - 0.5),
        "int": (-1) ** rank * (2**60 + rank),
        "bool": rank == 1,
        "nested": {
            "tensor": torch.randn(3, 2, generator=generator),
            "half": torch.randn(4, generator=generator).bfloat16(),
            "ints": torch.tensor([rank, -7 * rank, 2**40]),
            "mask": torch.tensor([True, rank == 0]),
            "scalar": torch.tensor(1.5 * rank),
            "empty": torch.empty(0),
        },
    }


def leaves(data, path=""):
    if isinstance(data, dict):
        return [leaf for k, v in data.items() for leaf in leaves(v, f"{path}/{k}")]
    return [(path, data)]


def reference(op, parts):
    """Slow reduction in float64 or exact integers."""
    exact = all(not isinstance(p, float) and not torch.is_tensor(p) for p in parts)
    if exact:
        return {"mean": sum(parts) / len(parts), "max": max(parts), "sum": sum(parts)}[op]
    stacked = torch.stack([torch.as_tensor(p, dtype=torch.float64) for p in parts])
    return {"mean": stacked.mean(0), "max": stacked.amax(0), "sum": stacked.sum(0)}[op]


def check_reduction(op, world_size, group):
    rank = collectives.group_rank(group)
    mine = values_of(rank)
    found = dict(leaves(all_reduce(mine, op, group=group)))
    for (path, before), (_, untouched) in zip(leaves(mine), leaves(values_of(rank)), strict=True):
        assert torch.equal(torch.as_tensor(before), torch.as_tensor(untouched)), path
        after = found[path]
        parts = [dict(leaves(values_of(r)))[path] for r in range(world_size)]
        expected = torch.as_tensor(reference(op, parts), dtype=torch.float64)
        if torch.is_tensor(before):
            is_float = before.dtype.is_floating_point
            kept = before.dtype if is_float or op != "mean" else torch.float32
            if before.dtype == torch.bool and op == "sum":
                kept = torch.int64
            assert (after.dtype, after.shape) == (kept, before.shape), path
            torch.testing.assert_close(after, expected.to(kept), msg=path)
        elif isinstance(before, int) and op != "mean":
            assert after == reference(op, parts), path
            assert type(after) is (bool if isinstance(before, bool) and op == "max" else int), path
        else:
            assert isinstance(after, float)
            assert after == pytest.approx(expected.item()), path


def check_gathering(world_size, group):
    rank = collectives.group_rank(group)
    rows = torch.arange(2 * (rank + 1)).reshape(rank + 1, 2).bfloat16() + 10 * rank
    found = all_gather(
        {"n": rank, "x": 0.1 + rank, "t": torch.tensor(rank), "rows": rows, "b": rank == 0},
        group=group,
    )
    assert torch.equal(found["n"], torch.arange(world_size))
    assert found["x"].tolist() == [0.1 + r for r in range(world_size)]
    assert torch.equal(found["t"], torch.arange(world_size))
    assert found["b"].tolist() == [r == 0 for r in range(world_size)]
    expected = [torch.arange(2.0 * (r + 1)).reshape(r + 1, 2) + 10 * r for r in range(world_size)]
    assert torch.equal(found["rows"], torch.cat(expected).bfloat16())
    assert gather_objects({"rank": rank, "text": "x" * 5000 * rank}, group) == [
        {"rank": r, "text": "x" * 5000 * r} for r in range(world_size)
    ]
    empty = all_gather(torch.empty(0 if rank else 2, 3), group=group)
    assert empty.shape == (2, 3)
    check_bytes(world_size, group)


def check_bytes(world_size, group):
    """Ragged and empty parts; rank r tells rank s who they are, r + s times."""
    rank = collectives.group_rank(group)
    assert gather_bytes(b"a" * rank, group) == [b"a" * r for r in range(world_size)]
    assert gather_bytes(b"", group) == [b""] * world_size
    parts = [bytes([rank, other]) * (rank + other) for other in range(world_size)]
    assert exchange_bytes(parts, group) == [
        bytes([other, rank]) * (rank + other) for other in range(world_size)
    ]
    assert exchange_bytes([b""] * world_size, group) == [b""] * world_size
    with pytest.raises(ValueError, match=f"one part for each of {world_size} ranks, got"):
        exchange_bytes([b""] * (world_size + 1), group)


@pytest.mark.parametrize("op", OPS)
def test_reduction_of_one_rank(op):
    check_reduction(op, 1, ALONE)


def test_gathering_of_one_rank():
    check_gathering(1, ALONE)


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="str at /a"):
        all_reduce({"a": "x"}, "mean")


def test_gradients_do_not_flow():
    weight = torch.ones(2, requires_grad=True)
    assert not all_reduce(weight * 2, "sum").requires_grad


def run_all_checks(rank, world_size):
    start_process_group(None)
    for op in OPS:
        check_reduction(op, world_size, None)
    check_gathering(world_size, None)
    check_large_tensors(rank, world_size)
    check_one_collective(rank)
    check_differing_ranks(rank)
    # Alone means alone, even with a process group.
    assert all_reduce(rank, "sum", group=ALONE) == rank
    assert gather_objects(rank, ALONE) == [rank]


def check_large_tensors(rank, world_size):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        parts = [(torch.arange(3000) % 100 - 50 + r).to(dtype) for r in range(world_size)]
        mine = parts[rank].clone()
        found = all_reduce({"big": mine, "small": 1}, "sum")
        torch.testing.assert_close(found["big"], sum(parts))
        assert found["small"] == world_size
        assert torch.equal(mine, parts[rank])
        biggest = all_reduce(mine, "max")
        torch.testing.assert_close(biggest, parts[-1])


def check_one_collective(rank):
    counted = []
    originals = {
        name: getattr(dist, name) for name in ("all_gather", "all_gather_object", "all_reduce")
    }
    for name, original in originals.items():
        setattr(dist, name, lambda *a, f=original, n=name, **k: (counted.append(n), f(*a, **k))[1])
    data = {f"metric{i}": float(rank + i) for i in range(50)}
    together = all_reduce({**data, "nested": {"deep": rank}}, "mean")
    assert counted == ["all_gather"]
    for name, original in originals.items():
        setattr(dist, name, original)
    assert {k: together[k] for k in data} == {k: all_reduce(v, "mean") for k, v in data.items()}


def check_differing_ranks(rank):
    for odd in ({"a": 1.0, "b": 2.0}, {"b": 1.0}, {"a": torch.ones(3)}, {"a": {"a": 1.0}}):
        for collective in (lambda d: all_reduce(d, "mean"), all_gather):
            with pytest.raises(ValueError, match="same structure"):
                collective({"a": 1.0} if rank == 0 else odd)
    with pytest.raises(ValueError, match="same structure"):
        all_gather(torch.ones(2, 3 + rank))
    # The order of keys is no difference.
    keys = ["x", "y"] if rank == 0 else ["y", "x"]
    assert all_reduce({k: float(ord(k)) for k in keys}, "mean") == {"x": 120.0, "y": 121.0}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives_over_ranks(world_size):
    run_multiprocess(run_all_checks, world_size, timeout_seconds=120)

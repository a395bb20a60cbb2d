"""Collectives on numbers, tensors, nested dicts and objects.

Every operation works without a process group, as if there were one rank.
"""

import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, repeat
from typing import TypeGuard, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightrft.strategy.distributed.process_end import NonFiniteError, PeerFailedError

Number = bool | int | float
Leaf = Number | Tensor
Tree = Leaf | Mapping[str, "Tree"]
T = TypeVar("T")


@final
class Alone:
    """Marker for a group of this process alone, whatever torch.distributed says."""


ALONE = Alone()
Group = ProcessGroup | Alone | None  # None is all ranks.

OPS = ("mean", "max", "sum")
SMALL_ELEMENTS = 256
INLINE_BYTES = 8192
ALL_INLINE_BYTES = 131_072
SMALLEST_INLINE_BYTES = 64


def _has_peers(group: Group) -> TypeGuard[ProcessGroup | None]:
    """Return whether torch.distributed runs the group; else collectives are the identity."""
    return not isinstance(group, Alone) and dist.is_initialized()


def _backends(group: Group) -> dict[str, str]:
    """Return kind of device -> backend; the backend's full name may be a compound of several."""
    config = dist.get_backend_config(None if isinstance(group, Alone) else group)
    return dict(part.split(":") for part in config.split(","))


def transfer_device(group: Group = None) -> torch.device:
    """Return the device whose tensors travel in the group without passing the host's memory."""
    moves_on_gpus = _has_peers(group) and _backends(group).get("cuda", "gloo") != "gloo"
    if moves_on_gpus:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def group_size(group: Group = None) -> int:
    """Return the number of ranks in the group; 1 without torch.distributed."""
    return dist.get_world_size(group) if _has_peers(group) else 1


def group_rank(group: Group = None) -> int:
    """Return the number of this rank within the group; 0 without torch.distributed."""
    return dist.get_rank(group) if _has_peers(group) else 0


def barrier(group: Group = None) -> None:
    """Wait until every rank of the group arrived."""
    if _has_peers(group):
        dist.barrier(group)


def gather_objects(item: T, group: Group = None) -> list[T]:
    """Return every rank's plain Python object, by rank, on every rank; see `gather_bytes`."""
    if not _has_peers(group):
        return [item]
    return [pickle.loads(data) for data in gather_bytes(pickle.dumps(item), group)]


def gather_bytes(data: bytes, group: Group = None) -> list[bytes]:
    """Return every rank's bytes, by rank, on every rank; lengths may differ.

    One collective if every rank's bytes are few, as they are for most objects: up to
    `INLINE_BYTES`, or less if padding would be most of what many ranks send.
    """
    if not _has_peers(group):
        return [data]
    room = max(SMALLEST_INLINE_BYTES, min(INLINE_BYTES, ALL_INLINE_BYTES // group_size(group)))
    frames = _gather_rows((len(data).to_bytes(8, "little") + data)[:room].ljust(room, b"\0"), group)
    sizes = [int.from_bytes(frame[:8], "little") for frame in frames]
    rows = [frame[8:] for frame in frames]
    if max(sizes) > room - 8:
        rows = _gather_rows(data.ljust(max(sizes), b"\0"), group)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def _gather_rows(row: bytes, group: ProcessGroup | None) -> list[bytes]:
    """Return every rank's bytes, as many on each."""
    outgoing = _movable(as_tensor(row), group)
    rows = [torch.empty_like(outgoing) for _ in range(group_size(group))]
    dist.all_gather(rows, outgoing, group=group)
    return [each.cpu().numpy().tobytes() for each in rows]


def exchange_bytes(parts: Sequence[bytes], group: Group = None) -> list[bytes]:
    """Send every rank its part, and return the parts that this rank received; both by rank.

    Raises:
        ValueError: There are not as many parts as ranks.
    """
    if len(parts) != group_size(group):
        raise ValueError(
            f"expected one part for each of {group_size(group)} ranks, got {len(parts)}"
        )
    if not _has_peers(group):
        return list(parts)

    def move(incoming: Tensor, outgoing: Tensor, lengths: list[int], sizes: list[int]) -> Tensor:
        received, sent = _movable(incoming, group), _movable(outgoing, group)
        dist.all_to_all_single(received, sent, lengths or None, sizes or None, group=group)
        return received.cpu()

    return exchanged_parts(parts, move)


def exchanged_parts(
    parts: Sequence[bytes], move: Callable[[Tensor, Tensor, list[int], list[int]], Tensor]
) -> list[bytes]:
    """Return the parts received for those sent, by rank.

    Args:
        parts: Bytes for each rank.
        move: Function of memory to fill, what is sent, and the lengths that come from and go to
            each rank, empty if they are equal; it returns what has come.
    """
    sizes = torch.tensor([len(part) for part in parts])
    lengths: list[int] = move(torch.empty_like(sizes), sizes, [], []).tolist()
    room = torch.empty(sum(lengths), dtype=torch.uint8)
    received = move(room, as_tensor(b"".join(parts)), lengths, sizes.tolist())
    content = received.numpy().tobytes()
    return [content[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]


def as_tensor(data: bytes) -> Tensor:
    """Return [bytes] uint8 on the CPU."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def _movable(tensor: Tensor, group: Group) -> Tensor:
    """Return the tensor on a device from which the group can move it."""
    return tensor if "cpu" in _backends(group) else tensor.cuda()


def run_together(action: Callable[[], T], group: Group, *, what: str) -> list[T]:
    """Return every rank's result of an action; if it fails on one, every rank raises.

    Args:
        action: Function whose results are plain Python objects.
        group: Ranks that must all call this.
        what: Failure in words, for messages.

    Raises:
        PeerFailedError: Another rank failed; the message names it. A rank that fails raises
            its original error.
    """
    try:
        result, problem = action(), None
    except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know of it
        result, problem = None, error
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    outcomes = gather_objects((result, text), group)
    failed = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(outcomes) if problem]
    if problem is not None:
        problem.add_note(f"{what} on {'; '.join(failed)}")
        raise problem
    if failed:
        raise PeerFailedError(f"{what} on {'; '.join(failed)}")
    return cast("list[T]", [result for result, _ in outcomes])


def nonfinite_names(
    tensors: Iterable[tuple[str, Tensor]], *, dtypes: Iterable[torch.dtype | None] = repeat(None)
) -> list[str]:
    """Return names of the tensors that hold an infinity or NaN; each is read once.

    Args:
        tensors: Tensors by name; those without floating point values are finite.
        dtypes: Type in which each is checked; a value that overflows there is not finite.
    """
    ends: dict[torch.device, dict[str, Tensor]] = {}
    for (name, value), dtype in zip(tensors, dtypes, strict=False):
        if value.is_floating_point() and value.numel():
            # Both are NaN if any value is, and rounding keeps the order of values.
            pair = torch.stack(value.detach().aminmax()).to(dtype or value.dtype).double()
            ends.setdefault(value.device, {})[name] = pair
    names: list[str] = []
    for pairs in ends.values():
        # One transfer per device, whatever the number of tensors.
        bounds = torch.stack(list(pairs.values())).tolist()
        names += [
            name
            for name, pair in zip(pairs, bounds, strict=True)
            if not all(map(math.isfinite, pair))
        ]
    return names


def require_finite(names: Sequence[str], *, what: str, group: Group = None) -> None:
    """Raise a NonFiniteError on every rank if any rank names a tensor. Collective."""
    all_names = dict.fromkeys(name for part in gather_objects(list(names), group) for name in part)
    if all_names:
        raise not_finite(list(all_names), what=what)


def not_finite(names: Sequence[str], *, what: str) -> NonFiniteError:
    """Return the error that names the first of the tensors."""
    return NonFiniteError(f"{what} not finite: {names[0]}{' and others' if names[1:] else ''}")


def _gather_alike(item: T, signature: object, group: Group) -> list[T]:
    """Call `gather_objects`; raise a ValueError on every rank if signatures differ."""
    gathered = gather_objects((repr(signature), item), group)
    odd = [rank for rank, (theirs, _) in enumerate(gathered) if theirs != gathered[0][0]]
    if odd:
        raise ValueError(
            f"ranks called a collective with different keys, types or shapes: rank(s) {odd} differ "
            "from rank 0; every rank must pass the same structure"
        )
    return [item for _, item in gathered]


def _flatten(data: Tree, path: str = "") -> list[tuple[str, Leaf]]:
    if isinstance(data, Mapping):
        # Sorted, so that ranks may have filled their dicts in different orders.
        return [
            leaf for key in sorted(data, key=str) for leaf in _flatten(data[key], f"{path}/{key}")
        ]
    if isinstance(data, bool | int | float | Tensor):
        return [(path, data)]
    raise TypeError(
        f"expected a tensor, a number or a dict of them, got {type(data).__name__} at {path or '/'}"
    )


def _rebuild(data: Tree, values: Mapping[str, Leaf], path: str = "") -> Tree:
    if isinstance(data, Mapping):
        return {key: _rebuild(data[key], values, f"{path}/{key}") for key in data}
    return values[path]


def _describe(leaf: Leaf, *, with_length: bool) -> tuple[object, ...]:
    if isinstance(leaf, Tensor):
        shape = tuple(leaf.shape)
        return ("tensor", str(leaf.dtype), len(shape), shape if with_length else shape[1:])
    return (type(leaf).__name__,)


def _widened(leaf: Leaf) -> Tensor:
    """Return an [n] flat detached int64 or float64 tensor: sums are exact or nearly so."""
    if not isinstance(leaf, Tensor):
        leaf = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)
    if leaf.dtype.is_complex:
        raise TypeError("complex tensors are not supported in all_reduce")
    wide = torch.float64 if leaf.dtype.is_floating_point else torch.int64
    return leaf.detach().reshape(-1).to(wide)


def _reduce_rows(rows: Tensor, op: str) -> Tensor:
    """Reduce [ranks, n] int64 or float64 to [n]; in rank order, hence equal on all ranks."""
    if op == "max":
        return rows.amax(0)
    # The sum first, in the exact type: large integers may cancel.
    return rows.sum(0) if op == "sum" else rows.sum(0).to(torch.float64) / rows.shape[0]


def _finish(leaf: Leaf, reduced: Tensor, op: str) -> Leaf:
    """Convert to the caller's type: a mean of integers is a float, a sum of bools an int."""
    if not isinstance(leaf, Tensor):
        value: Number = reduced.item()
        return bool(value) if isinstance(leaf, bool) and op == "max" else value
    dtype = leaf.dtype
    if op == "mean" and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    elif op == "sum" and dtype == torch.bool:
        dtype = torch.int64
    return reduced.to(leaf.device, dtype).reshape(leaf.shape)


def _reduce_large(leaf: Tensor, op: str, group: Group) -> Tensor:
    """Run one native all-reduce in int64 or at least float32, on the tensor's device."""
    flat = leaf.detach().reshape(-1)
    is_float = flat.dtype.is_floating_point
    wide = torch.promote_types(flat.dtype, torch.float32) if is_float else torch.int64
    buffer = flat.to(wide, copy=True)
    if _has_peers(group):
        if flat.device.type not in _backends(group):
            buffer = buffer.cuda()
        native = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        dist.all_reduce(buffer, op=native, group=group)
    return buffer.to(torch.float64) / group_size(group) if op == "mean" else buffer


def all_reduce(data: Tree, op: str, *, group: Group = None) -> Tree:
    """Reduce a tensor, a number or a nested dict over ranks.

    All leaves of up to `SMALL_ELEMENTS` elements are exchanged together, whatever their number;
    each larger one takes a separate collective.

    Args:
        data: Values, left unchanged. Dicts may be nested.
        op: "mean", "max" or "sum".
        group: Ranks; None is all ranks.

    Returns:
        The same structure, device and type; a mean of integers is a float (tensor), a sum of
        bools an integer. Integers are exact.

    Raises:
        AssertionError: Unknown `op`.
        ValueError: Ranks passed different keys, types or shapes; raised on every rank.
    """
    if op not in OPS:
        raise AssertionError(f"op must be one of {OPS}, got {op!r}")
    leaves = dict(_flatten(data))
    large = {
        path: leaf
        for path, leaf in leaves.items()
        if isinstance(leaf, Tensor) and leaf.numel() > SMALL_ELEMENTS
    }
    small = {path: _widened(leaf).cpu() for path, leaf in leaves.items() if path not in large}
    signature = (op, [(path, _describe(leaf, with_length=True)) for path, leaf in leaves.items()])
    rows = _gather_alike({path: flat.tolist() for path, flat in small.items()}, signature, group)
    reduced = {
        path: _reduce_rows(torch.tensor([row[path] for row in rows], dtype=flat.dtype), op)
        for path, flat in small.items()
    }
    reduced |= {path: _reduce_large(leaf, op, group) for path, leaf in large.items()}
    return _rebuild(data, {path: _finish(leaf, reduced[path], op) for path, leaf in leaves.items()})


def _gathered_leaf(leaf: Leaf) -> Tensor:
    """Return an at least 1-D tensor; Python floats are float64, ints int64."""
    if not isinstance(leaf, Tensor):
        flat = _widened(leaf)
        return flat.to(torch.bool) if isinstance(leaf, bool) else flat
    return leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach()


def all_gather(data: Tree, *, group: Group = None) -> Tree:
    """Concatenate every rank's values along the first dimension, in rank order.

    Tensors may differ in their first dimension only. A number or a 0-dim tensor gives a 1-D
    tensor with one entry per rank. One exchange, whatever the number of keys.

    Raises:
        ValueError: Ranks passed different keys, types or trailing shapes; raised on every rank.
    """
    leaves = {path: _gathered_leaf(leaf) for path, leaf in _flatten(data)}
    signature = [(path, _describe(leaf, with_length=False)) for path, leaf in leaves.items()]
    # A copy: a view would be pickled with all of its storage.
    local_values = {path: leaf.cpu().clone() for path, leaf in leaves.items()}
    parts = _gather_alike(local_values, signature, group)
    joined: dict[str, Leaf] = {
        path: torch.cat([part[path] for part in parts]).to(leaf.device)
        for path, leaf in leaves.items()
    }
    return _rebuild(data, joined)

"""Collectives on numbers, tensors, nested dicts and objects.

Every operation works without a process group, as if there were one rank.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Mapping
from typing import Literal, TypeGuard, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

ReduceOp = Literal["mean", "max", "sum"]
Number = bool | int | float
Leaf = Number | Tensor
Tree = Leaf | Mapping[str, "Tree"]
T = TypeVar("T")


@final
class Alone:
    """Stands for a group of this process alone, whatever torch.distributed says."""


ALONE = Alone()
Group = ProcessGroup | Alone | None  # None is all ranks.

OPS = ("mean", "max", "sum")
INLINE_BYTES = 4096
_HEADER = struct.Struct("<qq")


def _has_peers(group: Group) -> TypeGuard[ProcessGroup | None]:
    """Whether the group is one of torch.distributed; else collectives are the identity."""
    return not isinstance(group, Alone) and dist.is_initialized()


def group_size(group: Group = None) -> int:
    """Ranks in the group; 1 without torch.distributed."""
    return dist.get_world_size(group) if _has_peers(group) else 1


def group_rank(group: Group = None) -> int:
    """This rank within the group; 0 without torch.distributed."""
    return dist.get_rank(group) if _has_peers(group) else 0


def barrier(group: Group = None) -> None:
    """Waits until every rank of the group arrived."""
    if _has_peers(group):
        dist.barrier(group)


def _wire_device(group: ProcessGroup | None) -> torch.device:
    """CPU buffers, unless the group can move CUDA tensors only."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _gather_rows(row: Tensor, group: ProcessGroup | None) -> Tensor:
    """[bytes] uint8 of this rank -> [ranks, bytes] uint8 on the CPU; one collective."""
    device = _wire_device(group)
    rows = [torch.empty_like(row, device=device) for _ in range(group_size(group))]
    dist.all_gather(rows, row.to(device), group=group)
    return torch.stack(rows).cpu()


def _to_row(data: bytes, size: int) -> Tensor:
    row = torch.zeros(size, dtype=torch.uint8)
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return row


def exchange_bytes(data: bytes, *, signature: int = 0, group: Group = None) -> list[bytes]:
    """Every rank's bytes, by rank; lengths may differ.

    One collective if every rank sends at most `INLINE_BYTES` less a header, else two.

    Args:
        data: This rank's bytes.
        signature: Must be the same on all ranks.
        group: None is all ranks.

    Raises:
        ValueError: Signatures differ; raised on every rank.
    """
    if not _has_peers(group):
        return [data]
    room = INLINE_BYTES - _HEADER.size
    inline = data if len(data) <= room else b""
    header = _HEADER.pack(signature, len(data))
    rows = _gather_rows(_to_row(header + inline, INLINE_BYTES), group).numpy()
    headers = [_HEADER.unpack(row[: _HEADER.size].tobytes()) for row in rows]
    odd = [rank for rank, found in enumerate(headers) if found[0] != headers[0][0]]
    if odd:
        raise ValueError(
            f"ranks called a collective with different keys, types or shapes: rank(s) {odd} differ "
            "from rank 0; every rank must pass the same structure"
        )
    sizes = [found[1] for found in headers]
    longest = max(sizes)
    if longest <= room:
        parts = [row[_HEADER.size :] for row in rows]
    else:
        parts = list(_gather_rows(_to_row(data, longest), group).numpy())
    return [part[:size].tobytes() for part, size in zip(parts, sizes, strict=True)]


def gather_objects(item: T, group: Group = None) -> list[T]:
    """Every rank's plain Python object, by rank, on every rank."""
    if not _has_peers(group):
        return [item]
    return [pickle.loads(part) for part in exchange_bytes(pickle.dumps(item), group=group)]


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


def _signature(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _describe(leaf: Leaf, *, with_length: bool) -> tuple[object, ...]:
    if isinstance(leaf, Tensor):
        shape = tuple(leaf.shape)
        return ("tensor", str(leaf.dtype), len(shape), shape if with_length else shape[1:])
    return (type(leaf).__name__,)


def _as_tensor(leaf: Leaf) -> Tensor:
    """[n] flat detached tensor; Python numbers become int64 and float64."""
    if isinstance(leaf, Tensor):
        return leaf.detach().reshape(-1)
    if isinstance(leaf, float):
        return torch.tensor([leaf], dtype=torch.float64)
    return torch.tensor([int(leaf)], dtype=torch.int64)


def _is_exact(flat: Tensor) -> bool:
    return not flat.dtype.is_floating_point


def _to_words(flat: Tensor) -> Tensor:
    """Integers as int64, floats as the bits of float64: nothing is rounded."""
    if flat.dtype.is_complex:
        raise TypeError("complex tensors are not supported in all_reduce")
    if _is_exact(flat):
        return flat.to("cpu", torch.int64)
    return flat.to("cpu", torch.float64).view(torch.int64)


def _reduce_rows(rows: Tensor, op: str) -> Tensor:
    """[ranks, n] int64 or float64 -> [n]; in rank order, hence equal on all ranks."""
    if op == "max":
        return rows.amax(0)
    if op == "sum":
        return rows.sum(0)
    # The sum first, in the exact type: large integers may cancel.
    return rows.sum(0).to(torch.float64) / rows.shape[0]


def _finish(leaf: Leaf, reduced: Tensor, op: str) -> Leaf:
    """Back to the caller's type: a mean of integers is a float, a sum of bools an int."""
    if not isinstance(leaf, Tensor):
        value: Number = reduced.item()
        return bool(value) if isinstance(leaf, bool) and op == "max" else value
    dtype = leaf.dtype
    if op == "mean" and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    elif op == "sum" and dtype == torch.bool:
        dtype = torch.int64
    return reduced.to(leaf.device, dtype).reshape(leaf.shape)


def _reduce_small(words: Tensor, signature: int, group: Group) -> Tensor:
    parts = exchange_bytes(words.numpy().tobytes(), signature=signature, group=group)
    if not words.numel():
        return words.expand(len(parts), 0)
    return torch.stack([torch.frombuffer(bytearray(p), dtype=torch.int64) for p in parts])


def _reduce_large(flat: Tensor, op: str, group: ProcessGroup | None) -> Tensor:
    """One native all-reduce in int64 or at least float32, on the tensor's device."""
    wide = torch.int64 if _is_exact(flat) else torch.promote_types(flat.dtype, torch.float32)
    buffer = flat.to(_wire_device(group) if flat.device.type == "cpu" else flat.device, wide)
    buffer = buffer.clone() if buffer.data_ptr() == flat.data_ptr() else buffer
    dist.all_reduce(buffer, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)
    return buffer.to(torch.float64) / group_size(group) if op == "mean" else buffer


def all_reduce(data: Tree, op: str, *, group: Group = None) -> Tree:
    """Reduces a tensor, a number or a nested dict over ranks.

    Values of up to `INLINE_BYTES` in all take one collective, whatever the number of keys. Larger
    input takes one more for its small leaves and one for each leaf that is itself larger.

    Args:
        data: Left unchanged. Dicts may be nested.
        op: "mean", "max" or "sum".
        group: None is all ranks.

    Returns:
        The same structure, device and type; a mean of integers is a float (tensor), a sum of
        bools an integer. Integers are exact.

    Raises:
        AssertionError: Unknown `op`.
        ValueError: Ranks passed different keys, types or shapes; raised on every rank.
    """
    if op not in OPS:
        raise AssertionError(f"op must be one of {OPS}, got {op!r}")
    leaves = _flatten(data)
    flats = {path: _as_tensor(leaf) for path, leaf in leaves}
    signature = _signature(op, [(p, _describe(leaf, with_length=True)) for p, leaf in leaves])
    large = [path for path, flat in flats.items() if 8 * flat.numel() > INLINE_BYTES // 2]
    small = [path for path in flats if path not in set(large)]
    words = torch.cat([torch.empty(0, dtype=torch.int64), *(_to_words(flats[p]) for p in small)])
    rows = _reduce_small(words, signature, group) if leaves else words.unsqueeze(0)
    reduced: dict[str, Tensor] = {}
    start = 0
    for path in small:
        part = rows[:, start : start + flats[path].numel()]
        start += flats[path].numel()
        values = part if _is_exact(flats[path]) else part.contiguous().view(torch.float64)
        reduced[path] = _reduce_rows(values, op)
    for path in large:
        if _has_peers(group):
            reduced[path] = _reduce_large(flats[path], op, group)
        else:
            reduced[path] = flats[path].clone()
    return _rebuild(data, {path: _finish(leaf, reduced[path], op) for path, leaf in leaves})


def _gathered_leaf(leaf: Leaf) -> Tensor:
    """At least 1-D tensor in the caller's type; Python floats are float64, ints int64."""
    if not isinstance(leaf, Tensor):
        flat = _as_tensor(leaf)
        return flat.to(torch.bool) if isinstance(leaf, bool) else flat
    return leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach()


def all_gather(data: Tree, *, group: Group = None) -> Tree:
    """Concatenates every rank's values along the first dimension, in rank order.

    Tensors may differ in their first dimension only. A number or a 0-dim tensor gives a 1-D
    tensor with one entry per rank. One or two collectives, whatever the number of keys.

    Raises:
        ValueError: Ranks passed different keys, types or trailing shapes; raised on every rank.
    """
    leaves = [(path, _gathered_leaf(leaf)) for path, leaf in _flatten(data)]
    if not _has_peers(group):
        return _rebuild(data, {path: leaf.clone() for path, leaf in leaves})
    signature = _signature("gather", [(p, _describe(t, with_length=False)) for p, t in leaves])
    counts = struct.pack(f"<{len(leaves)}q", *(tensor.shape[0] for _, tensor in leaves))
    body = b"".join(
        tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        for _, tensor in leaves
    )
    parts = exchange_bytes(counts + body, signature=signature, group=group)
    pieces: dict[str, list[Tensor]] = {path: [] for path, _ in leaves}
    for part in parts:
        lengths = struct.unpack_from(f"<{len(leaves)}q", part)
        position = 8 * len(leaves)
        for (path, own), length in zip(leaves, lengths, strict=True):
            shape = (length, *own.shape[1:])
            size = _byte_size(shape, own.dtype)
            pieces[path].append(_from_bytes(part[position : position + size], own.dtype, shape))
            position += size
    joined = {path: torch.cat(pieces[path]).to(own.device) for path, own in leaves}
    return _rebuild(data, joined)


def _from_bytes(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def _byte_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize

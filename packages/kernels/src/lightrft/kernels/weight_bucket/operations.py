"""Hash, pack and unpack: checked calls of the native code or torch."""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor

from lightrft.kernels.weight_bucket import native, reference
from lightrft.kernels.weight_bucket.native import Move

Implementation = Literal["auto", "native", "torch"]
_IMPLEMENTATIONS = ("auto", "native", "torch")


# Runs moves, and adds their hashes to a tensor on their device, if there is one.
_Runner = Callable[[Sequence[Move], Tensor | None], None]


def hash_tensor(tensor: Tensor, *, start: int = 0, impl: Implementation = "auto") -> int:
    """Return the position-keyed 64-bit hash of one tensor's bits; see `hash_tensors`.

    Args:
        tensor: Any shape, device and dtype of 1, 2, 4 or 8 bytes; a strided one is copied first.
        start: Index of the first element in the full logical tensor.
        impl: Implementation "native" (C++ or CUDA), "torch", or "auto"; all give the same number.
    """
    return hash_tensors([tensor], starts=[start], impl=impl)[0]


def hash_tensors(
    tensors: Sequence[Tensor],
    *,
    starts: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    impl: Implementation = "auto",
) -> list[int]:
    """Return position-keyed 64-bit hashes of many tensors' bits, in one pass and with one wait.

    A hash is additive over disjoint flat ranges: pass each range's first index as its start and add
    with `combine_hashes`. `weight_bucket/reference.py` has the formula and what it detects.

    Args:
        tensors: Any shape, device and dtype of 1, 2, 4 or 8 bytes; strided ones are copied first.
        starts: Index of each tensor's first element in its full logical tensor; 0 if None.
        dtypes: dtypes to which tensors are cast before hashing; None for no cast.
        impl: Implementation "native" (C++ or CUDA), "torch", or "auto"; all give the same numbers.

    Returns:
        Signed 64-bit integers.

    Raises:
        ValueError: A start is negative, a dtype has another size, lengths differ, or `impl` is
            unknown.
        RuntimeError: "native" was requested but has no code for the tensors' device or cast.
    """
    starts = [0] * len(tensors) if starts is None else starts
    dtypes = [tensor.dtype for tensor in tensors] if dtypes is None else dtypes
    if not len(tensors) == len(starts) == len(dtypes):
        raise ValueError(
            f"hash_tensors needs one start and dtype per tensor: got {len(tensors)} tensors, "
            f"{len(starts)} starts, {len(dtypes)} dtypes"
        )
    if not tensors:
        return []
    if len({tensor.device for tensor in tensors}) > 1:
        return [
            hash_tensors([t], starts=[s], dtypes=[d], impl=impl)[0]
            for t, s, d in zip(tensors, starts, dtypes, strict=True)
        ]
    flats = [t if t.is_contiguous() else t.detach().contiguous() for t in tensors]
    moves = [_hash_only(*each) for each in zip(flats, starts, dtypes, strict=True)]
    run = _choose(impl, moves, flats)
    if run is None:
        hashes = _torch_hashes(flats, moves, impl)
    else:
        hashes = torch.zeros(len(moves), dtype=torch.int64, device=flats[0].device)
        run(moves, hashes)
    values: list[int] = hashes.tolist()
    return values


def _hash_only(flat: Tensor, start: int, dtype: torch.dtype) -> Move:
    if start < 0:
        raise ValueError(f"start must be an index into the full tensor (>= 0): got {start}")
    if dtype.itemsize > 8 or dtype.is_complex:
        raise ValueError(f"cannot hash {dtype}: expected a real dtype of 1, 2, 4 or 8 bytes")
    return Move(flat.data_ptr(), 0, 1, flat.numel(), 0, flat.dtype, dtype, start)


def pack(
    sources: Sequence[Tensor],
    out: Tensor,
    byte_offsets: Sequence[int],
    dtypes: Sequence[torch.dtype],
    *,
    impl: Implementation = "auto",
) -> None:
    """Cast tensors (round to nearest even) into their places in a bucket.

    Args:
        sources: Tensors, read in flat order; contiguous, or matrices with contiguous rows (a
            column shard).
        out: [bytes] uint8, contiguous. Bytes between segments stay unchanged.
        byte_offsets: Offset of each tensor; a multiple of its new element size.
        dtypes: dtype to which each tensor is cast.
        impl: Implementation "native" (C++ or CUDA), "torch", or "auto"; all write the same bits.

    Raises:
        ValueError: Lengths differ, a tensor is strided, or a segment lies outside `out`.
        RuntimeError: "native" was requested but is not built or does not know a cast.
    """
    if not len(sources) == len(byte_offsets) == len(dtypes):
        raise ValueError(
            f"pack needs one byte offset and dtype per source: got {len(sources)} sources, "
            f"{len(byte_offsets)} offsets, {len(dtypes)} dtypes"
        )
    address, size = _bucket_place(out)
    moves = []
    for source, offset, dtype in zip(sources, byte_offsets, dtypes, strict=True):
        num_rows, row_elements, stride = _rows(source)
        _check_segment(address, size, offset, num_rows * row_elements, dtype)
        moves.append(
            Move(
                source.data_ptr(),
                address + offset,
                num_rows,
                row_elements,
                stride,
                source.dtype,
                dtype,
                0,
            )
        )
    run = _choose(impl, moves, [out, *sources])
    if run is not None:
        run(moves, None)
        return
    for source, offset, dtype in zip(sources, byte_offsets, dtypes, strict=True):
        _place(out, offset, source.numel(), dtype).copy_(source.detach().reshape(-1))


def unpack(
    bucket: Tensor,
    byte_offsets: Sequence[int],
    outs: Sequence[Tensor],
    *,
    impl: Implementation = "auto",
) -> None:
    """Copy ranges of a bucket into tensors of the same dtype as the bytes.

    Args:
        bucket: [bytes] uint8, contiguous.
        byte_offsets: Start of each tensor; a multiple of its element size.
        outs: Contiguous tensors, filled in flat order.
        impl: Implementation, as in `pack`.

    Raises:
        ValueError: Lengths differ, a tensor is strided, or a segment lies outside `bucket`.
        RuntimeError: "native" was requested but is not built or a tensor is not on the host.
    """
    if len(byte_offsets) != len(outs):
        raise ValueError(
            f"unpack needs one byte offset per tensor: got {len(byte_offsets)} and {len(outs)}"
        )
    address, size = _bucket_place(bucket)
    moves = []
    for offset, out in zip(byte_offsets, outs, strict=True):
        if not out.is_contiguous():
            _refuse_strided(out, "output")
        dtype, numel = out.dtype, out.numel()
        _check_segment(address, size, offset, numel, dtype)
        moves.append(Move(address + offset, out.data_ptr(), 1, numel, 0, dtype, dtype, 0))
    run = _choose(impl, moves, [bucket, *outs])
    if run is not None:
        run(moves, None)
        return
    for offset, out in zip(byte_offsets, outs, strict=True):
        out.detach().view(-1).copy_(_place(bucket, offset, out.numel(), out.dtype))


def _torch_hashes(flats: Sequence[Tensor], moves: Sequence[Move], impl: Implementation) -> Tensor:
    """Return the hashes, [tensors] int64 on their device, without the extension."""
    hash_flat = device_hasher(flats[0].device) if impl == "auto" else reference.hash_flat
    return torch.stack(
        [
            hash_flat(flat.detach().to(move.dtype), move.start)
            for flat, move in zip(flats, moves, strict=True)
        ]
    )


@cache
def device_hasher(device: torch.device) -> Callable[[Tensor, int], Tensor]:
    """Return the Triton kernel if it matches the definition on this GPU, else plain torch."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return reference.hash_flat
    try:
        from lightrft.kernels.weight_bucket import triton_hash

        for dtype in (torch.bfloat16, torch.float32):
            sample = torch.arange(5000, dtype=torch.float32, device=device).to(dtype)
            hash_value = triton_hash.hash_flat(sample, 77)
            if not torch.equal(hash_value, reference.hash_flat(sample, 77)):
                raise ValueError(f"it hashes {dtype} to another number")
    except Exception as err:  # noqa: BLE001 - any fault of a compiler or driver
        warnings.warn(
            f"the Triton hash is not used on {device}, plain torch hashes more slowly: "
            f"{type(err).__name__}: {err}; or build lightrft-kernels with nvcc",
            stacklevel=2,
        )
        return reference.hash_flat
    return triton_hash.hash_flat


def _choose(
    impl: Implementation, moves: Sequence[Move], tensors: Sequence[Tensor]
) -> _Runner | None:
    """Choose the runner of moves: the extension if wanted and possible, None for torch."""
    if impl not in _IMPLEMENTATIONS:
        raise ValueError(f"unknown impl {impl!r}: expected one of {', '.join(_IMPLEMENTATIONS)}")
    if impl == "torch":
        return None
    extension = native.load_extension()
    reason = "is not built"
    if extension is not None:
        reason = "has no code for this device or cast"
        devices = {tensor.device for tensor in tensors}
        device = devices.pop() if len(devices) == 1 else None
        if device is not None and device.type == "cpu" and native.can_run(moves):
            return partial(native.run, extension)
        if device is not None and device.type == "cuda" and extension.has_cuda:
            from lightrft.kernels.weight_bucket import cuda

            if cuda.can_run(moves):
                return partial(cuda.run, extension, device)
    if impl == "native":
        raise RuntimeError(f"impl='native': the extension {reason}; pass impl='auto'")
    return None


def _rows(tensor: Tensor) -> tuple[int, int, int]:
    """Return rows, elements and stride of a source: flat, or a matrix of contiguous rows."""
    if tensor.is_contiguous():
        return 1, tensor.numel(), 0
    if tensor.dim() != 2 or tensor.stride(1) != 1:
        _refuse_strided(tensor, "source")
    return tensor.shape[0], tensor.shape[1], tensor.stride(0)


def _refuse_strided(tensor: Tensor, role: str) -> None:
    raise ValueError(
        f"every {role} must be contiguous: got shape {tuple(tensor.shape)}, strides "
        f"{tensor.stride()}; pass .contiguous()"
    )


def _bucket_place(bucket: Tensor) -> tuple[int, int]:
    """Return address and bytes of a bucket."""
    if bucket.dtype != torch.uint8 or bucket.dim() != 1 or not bucket.is_contiguous():
        raise ValueError(
            f"a bucket must be a contiguous 1-D uint8 tensor: got {bucket.dtype}, shape "
            f"{tuple(bucket.shape)}"
        )
    return bucket.data_ptr(), bucket.numel()


def _check_segment(address: int, size: int, offset: int, numel: int, dtype: torch.dtype) -> None:
    stop = offset + numel * dtype.itemsize
    if offset < 0 or stop > size:
        raise ValueError(f"segment [{offset}, {stop}) lies outside the bucket of {size} bytes")
    if numel and (address + offset) % dtype.itemsize:
        raise ValueError(
            f"a segment of {dtype} must start at a multiple of {dtype.itemsize} bytes: got {offset}"
        )


def _place(bucket: Tensor, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return a segment of a bucket, already checked, as a flat tensor of `dtype`."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device=bucket.device)
    return bucket[offset : offset + numel * dtype.itemsize].view(dtype)

"""Hash, pack and unpack: checks arguments, then calls the native code or torch."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightrft.kernels.weight_bucket import cuda, native, reference

Implementation = Literal["auto", "native", "torch"]
_IMPLEMENTATIONS = ("auto", "native", "torch")


def hash_tensor(
    tensor: Tensor, *, start: int = 0, impl: Implementation = "auto", num_threads: int = 0
) -> int:
    """Position-keyed 64-bit hash of a tensor's bits.

    hash = sum_i mix64(bits(p_i) XOR mix64(start + i)) mod 2^64, i = index in the flattened tensor;
    bits(p) is the raw bit pattern, zero-extended to 64 bits. It is additive over disjoint flat
    ranges: pass each range's first index as `start` and add with `combine_hashes`.

    mix64(x): z = x + 0x9E3779B97F4A7C15; z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB; z ^ (z >> 31), all mod 2^64.

    Args:
        tensor: Any shape, device and dtype of 1, 2, 4 or 8 bytes; a strided one is copied first.
        start: Index of the first element in the full logical tensor.
        impl: "native" (C++ or CUDA), "torch", or "auto"; all give the same number.
        num_threads: Threads of the native code; 0 takes torch's.

    Returns:
        A signed 64-bit integer.

    Raises:
        ValueError: `start` is negative, the dtype has another size, or `impl` is unknown.
        RuntimeError: "native" was asked for but is not built for the tensor's device.
    """
    if start < 0:
        raise ValueError(f"start must be an index into the full tensor (>= 0): got {start}")
    if tensor.dtype.itemsize > 8 or tensor.is_complex():
        raise ValueError(f"cannot hash {tensor.dtype}: expected a real dtype of 1, 2, 4 or 8 bytes")
    extension = _choose(impl, fits=tensor.device.type == "cpu" or _has_device_code(tensor))
    flat = tensor.detach().contiguous()
    if extension is None:
        return reference.hash_flat(flat, start)
    if flat.is_cuda:
        return cuda.hash_flat(extension, flat, start)
    return native.hash_flat(extension, flat, start, num_threads=num_threads)


def pack(
    sources: Sequence[Tensor],
    out: Tensor,
    byte_offsets: Sequence[int],
    dtypes: Sequence[torch.dtype],
    *,
    num_threads: int = 0,
    impl: Implementation = "auto",
    starts: Sequence[int] | None = None,
    hashes: Tensor | None = None,
) -> None:
    """Casts tensors (round to nearest even) into their places in a bucket.

    Args:
        sources: Read in flat order; contiguous, or matrices whose rows are (a column shard).
        out: [bytes] uint8, contiguous. Bytes between segments are left as they are.
        byte_offsets: Where each tensor goes; a multiple of its new element size.
        dtypes: The dtype each tensor is cast to.
        num_threads: Threads of the native code; 0 takes torch's.
        impl: "native" (C++ or CUDA), "torch", or "auto"; all write the same bits.
        starts: Index of each source's first element in its full tensor, for `hashes`; 0 if None.
        hashes: [sources] int64, beside `out`: the hash of what was packed of each source is added
            (`hash_tensor`'s), on a GPU in the same pass over memory.

    Raises:
        ValueError: Lengths differ, a tensor is strided, or a segment lies outside `out`.
        RuntimeError: "native" was asked for but is not built or does not know a cast.
    """
    if not len(sources) == len(byte_offsets) == len(dtypes):
        raise ValueError(
            f"pack needs one byte offset and dtype per source: got {len(sources)} sources, "
            f"{len(byte_offsets)} offsets, {len(dtypes)} dtypes"
        )
    rows = [_rows(source.detach()) for source in sources]
    places = [
        _place(out, offset, source.numel(), dtype)
        for source, offset, dtype in zip(rows, byte_offsets, dtypes, strict=True)
    ]
    if hashes is not None and (hashes.shape != (len(rows),) or hashes.dtype != torch.int64):
        raise ValueError(
            f"expected hashes [{len(rows)}] int64: got {tuple(hashes.shape)} {hashes.dtype}"
        )
    _copy(rows, places, impl, num_threads, starts=starts, hashes=hashes)


def unpack(
    bucket: Tensor,
    byte_offsets: Sequence[int],
    outs: Sequence[Tensor],
    *,
    num_threads: int = 0,
    impl: Implementation = "auto",
) -> None:
    """Copies ranges of a bucket into tensors of the same dtype as the bytes.

    Args:
        bucket: [bytes] uint8, contiguous.
        byte_offsets: Where each tensor starts; a multiple of its element size.
        outs: Contiguous tensors, filled in flat order.
        num_threads: Threads of the native code; 0 takes torch's.
        impl: As in `pack`.

    Raises:
        ValueError: Lengths differ, a tensor is strided, or a segment lies outside `bucket`.
        RuntimeError: "native" was asked for but is not built or a tensor is not on the host.
    """
    if len(byte_offsets) != len(outs):
        raise ValueError(
            f"unpack needs one byte offset per tensor: got {len(byte_offsets)} and {len(outs)}"
        )
    flat_outs = [_flat(out.detach(), "output") for out in outs]
    places = [
        _place(bucket, offset, out.numel(), out.dtype)
        for offset, out in zip(byte_offsets, flat_outs, strict=True)
    ]
    _copy(places, flat_outs, impl, num_threads)


def _copy(
    sources: Sequence[Tensor],
    outs: Sequence[Tensor],
    impl: Implementation,
    num_threads: int,
    *,
    starts: Sequence[int] | None = None,
    hashes: Tensor | None = None,
) -> None:
    fits_device = bool(outs) and _has_device_code(outs[0]) and cuda.can_run(sources, outs)
    fits = fits_device or all(
        native.can_copy(source, out.dtype) and out.device.type == "cpu"
        for source, out in zip(sources, outs, strict=True)
    )
    extension = _choose(impl, fits=fits)
    if extension is not None and fits_device:
        cuda.run(extension, sources, outs, starts=starts, hashes=hashes)
        return
    if extension is None:
        reference.copy_segments(sources, outs)
    else:
        native.copy_segments(extension, sources, outs, num_threads=num_threads)
    if hashes is not None:
        for slot, out in enumerate(outs):
            start = 0 if starts is None else starts[slot]
            hashes[slot] += hash_tensor(out, start=start, impl=impl, num_threads=num_threads)


def _has_device_code(tensor: Tensor) -> bool:
    extension = native.load_extension()
    return tensor.is_cuda and extension is not None and extension.has_cuda


def _choose(impl: Implementation, *, fits: bool) -> native.Extension | None:
    """The extension if it is wanted and can do this, None for torch."""
    if impl not in _IMPLEMENTATIONS:
        raise ValueError(f"unknown impl {impl!r}: expected one of {', '.join(_IMPLEMENTATIONS)}")
    if impl == "torch":
        return None
    extension = native.load_extension()
    if impl == "native" and (extension is None or not fits):
        reason = "is not built" if extension is None else "has no code for this device or cast"
        raise RuntimeError(f"impl='native': the extension {reason}; pass impl='auto'")
    return extension if fits else None


def _rows(tensor: Tensor) -> Tensor:
    """A source as it is read: flat, or a matrix with contiguous rows."""
    if tensor.dim() == 2 and tensor.stride(1) == 1 and not tensor.is_contiguous():
        return tensor
    return _flat(tensor, "source")


def _flat(tensor: Tensor, role: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"every {role} must be contiguous: got shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}; pass .contiguous()"
        )
    return tensor.view(-1)


def _place(bucket: Tensor, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The segment of a bucket as a flat tensor of `dtype`."""
    if bucket.dtype != torch.uint8 or bucket.dim() != 1 or not bucket.is_contiguous():
        raise ValueError(
            f"a bucket must be a contiguous 1-D uint8 tensor: got {bucket.dtype}, shape "
            f"{tuple(bucket.shape)}"
        )
    stop = offset + numel * dtype.itemsize
    if offset < 0 or stop > bucket.numel():
        raise ValueError(
            f"segment [{offset}, {stop}) lies outside the bucket of {bucket.numel()} bytes"
        )
    if (bucket.storage_offset() + offset) % dtype.itemsize:
        raise ValueError(
            f"a segment of {dtype} must start at a multiple of {dtype.itemsize} bytes: got {offset}"
        )
    return bucket[offset:stop].view(dtype)

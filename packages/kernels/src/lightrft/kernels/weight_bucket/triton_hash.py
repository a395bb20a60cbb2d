# ruff: noqa: ANN001, ANN201, PLR0913, TID253
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Hash on a GPU if the extension was built without CUDA: one Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightrft.kernels.weight_bucket.reference import BLOCK_ELEMENTS, hashed_words, key_table

# Blocks for one program.
_BLOCKS_PER_PROGRAM = 16


# The block changes from call to call and is unrelated to alignment.
@triton.jit(do_not_specialize=["first_block"])
def hash_blocks(
    values,
    masks,
    factors,
    totals,
    first_block,
    place,
    numel,
    NUM_BITS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """totals[program] = hash of NUM_BLOCKS blocks, less the part before `place` and past the end.

    values: [numel] integers of NUM_BITS, the first of which lies at `place` of block `first_block`.
    """
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    mask = tl.load(masks + lanes).to(tl.uint32)
    factor = tl.load(factors + lanes).to(tl.uint32)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for step in range(NUM_BLOCKS):
        block = program.to(tl.int64) * NUM_BLOCKS + step
        key = (first_block + block).to(tl.uint64) + 0x9E3779B97F4A7C15
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB
        key = key ^ (key >> 31)
        index = block * BLOCK + lanes - place
        is_inside = (index >= 0) & (index < numel)
        bits = tl.load(values + index, mask=is_inside, other=0).to(tl.uint32)
        if NUM_BITS < 32:
            bits = bits & ((1 << NUM_BITS) - 1)
        x = (bits ^ mask ^ (key >> 32).to(tl.uint32)) * factor
        x = x ^ (x >> 15)
        product = x.to(tl.uint64) * factor.to(tl.uint64)
        product = product ^ (product >> 32)
        total += tl.where(is_inside, product * (key | 1), 0)
    tl.store(totals + program, tl.sum(total, axis=0).to(tl.int64, bitcast=True))


def hash_flat(tensor: Tensor, start: int) -> Tensor:
    """Return the hash, [] int64, of a contiguous tensor whose first index is `start`."""
    flat, start = hashed_words(tensor, start)
    first_block, place = divmod(start, BLOCK_ELEMENTS)
    num_blocks = -(-(place + flat.numel()) // BLOCK_ELEMENTS)
    num_programs = -(-num_blocks // _BLOCKS_PER_PROGRAM)
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    totals = torch.empty(num_programs, dtype=torch.int64, device=flat.device)
    hash_blocks[(num_programs,)](
        flat,
        *key_table(flat.device),
        totals,
        first_block,
        place,
        flat.numel(),
        NUM_BITS=8 * flat.dtype.itemsize,
        NUM_BLOCKS=_BLOCKS_PER_PROGRAM,
        BLOCK=BLOCK_ELEMENTS,
        num_warps=8,
    )
    return totals.sum()

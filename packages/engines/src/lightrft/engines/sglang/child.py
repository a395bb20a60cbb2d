"""What runs in SGLang's scheduler process before SGLang itself."""

import torch
from torch import Tensor

from lightrft.engines.hf.random import mix64


def run_scheduler(*args: object, **keywords: object) -> None:
    """SGLang's scheduler; without a GPU, sampling by seed works there too.

    SGLang draws by the seed of a request only in its deterministic mode, which replaces matrix
    products by Triton kernels and hashes by a compiled function. On a CPU there are neither: the
    products stay as they are, and the hash is computed by torch.
    """
    from sglang.srt.layers import sampler
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_executor.model_runner import ModelRunner

    if not torch.cuda.is_available():
        ModelRunner.maybe_enable_batch_invariant_mode = lambda _: None
        sampler.murmur_hash32 = hash_uint32
    run_scheduler_process(*args, **keywords)


def hash_uint32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """One pseudorandom 32-bit number for each row and column.

    Args:
        seed: [rows] uint64.
        positions: [rows] integer.
        columns: [vocab] integer.

    Returns:
        [rows, vocab] int64 in [0, 2^32).
    """
    keys = mix64(mix64(seed.to(torch.int64)) ^ positions.to(torch.int64))
    bits = mix64(keys[:, None] ^ mix64(columns.to(torch.int64))[None, :])
    return (bits >> 32) & 0xFFFFFFFF

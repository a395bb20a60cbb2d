"""The CUDA weight buckets: what the table says here, all values on a GPU."""

import ctypes

import pytest
import torch

from lightrft.kernels import (
    BucketBroadcaster,
    BucketLayout,
    TensorSpec,
    capabilities,
    hash_tensor,
    hash_tensors,
    pack,
)
from lightrft.kernels.weight_bucket import cuda
from lightrft.kernels.weight_bucket.native import Move

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class RecordingExtension:
    """Stands in for the compiled module: reads the tables it is given."""

    device_tile_elements = 32

    def __init__(self):
        self.tables = []

    def launch_segments(self, segments, num_segments, num_tiles, hashes, device, stream):
        words = (ctypes.c_int64 * (12 * num_segments)).from_address(segments)
        rows = [tuple(words[12 * i : 12 * i + 12]) for i in range(num_segments)]
        self.tables.append((rows, num_tiles))


def test_the_table_has_a_row_for_each_move_and_numbers_the_tiles():
    matrix = torch.randn(13, 24)
    bf16 = torch.bfloat16
    moves = [
        Move(matrix.data_ptr() + 16, 4096, 13, 11, 24, torch.float32, bf16, 7),
        Move(matrix.data_ptr(), 8192, 1, 0, 0, torch.float32, bf16, 0),
        Move(matrix.data_ptr(), 0, 1, 100, 0, bf16, bf16, 1000),
    ]
    extension = RecordingExtension()
    cuda.run(extension, torch.device("cpu"), moves, None)
    first = (matrix.data_ptr() + 16, 4096, 13, 11, 24, 11, 11, 7, 4, 0, 0, 0)
    last = (matrix.data_ptr(), 0, 1, 100, 0, 100, 100, 1000, 1, 5, 2, 0)
    assert extension.tables == [([first, last], 5 + 4)]
    cuda.run(extension, torch.device("cpu"), moves[1:2], None)
    assert len(extension.tables) == 1  # nothing to do
    with pytest.raises(ValueError, match=r"no device cast from torch\.float64 to torch\.float16"):
        cuda.build_table([moves[0]._replace(source_dtype=torch.float64, dtype=torch.float16)], 32)


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_pack_of_column_shards(impl):
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(9, 20, generator=generator)
    sources = [matrix[:, 3:11], matrix[4:], torch.randn(5, generator=generator)]
    bucket = torch.zeros(1024, dtype=torch.uint8)
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    pack(sources, bucket, [0, 256, 512], dtypes, impl=impl)
    for source, offset, dtype in zip(sources, [0, 256, 512], dtypes, strict=True):
        packed = bucket[offset : offset + source.numel() * dtype.itemsize].view(dtype)
        assert torch.equal(packed, source.to(dtype).reshape(-1))


needs_device_code = pytest.mark.skipif(
    not (torch.cuda.is_available() and capabilities().cuda_extension), reason="no CUDA extension"
)


@pytest.mark.gpu
@needs_device_code
@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 3, 8])
def test_device_pack_equals_torch_bitwise(source_dtype, out_dtype, shift):
    if source_dtype != out_dtype and torch.float32 not in (source_dtype, out_dtype):
        pytest.skip("no such cast on the device")
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 65504.0, 65520.0, 1e-8, 1e-40])
    base = torch.cat((special, torch.randn(200_000) * 3)).cuda().to(source_dtype)
    matrix = base[:199_920].view(357, 560)
    sources = [base[shift:], base[shift : shift + 5], matrix[:, shift : shift + 101], base[:0]]
    offsets, position = [], 0
    for source in sources:
        offsets.append(position)
        position += -(-source.numel() * out_dtype.itemsize // 256) * 256 + 16 * shift
    results = []
    for impl in ("native", "torch"):
        bucket = torch.full((position,), 7, dtype=torch.uint8, device="cuda")
        dtypes = [out_dtype] * len(sources)
        pack(sources, bucket, offsets, dtypes, impl=impl)
        hashes = hash_tensors(sources, starts=[11, 0, 5, 0], dtypes=dtypes, impl=impl)
        results.append((bucket, hashes))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.gpu
@needs_device_code
@pytest.mark.parametrize("dtype", [torch.uint8, *DTYPES, torch.float64])
def test_device_hash_equals_torch(dtype):
    tensor = (torch.randn(100_003, device="cuda") * 50).to(dtype)
    for part in (tensor, tensor[1:], tensor[:3], tensor[:0]):
        expected = hash_tensor(part, start=9, impl="torch")
        assert hash_tensor(part, start=9, impl="native") == expected


@pytest.mark.gpu
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_buckets_are_not_overwritten_while_their_consumer_is_late(buffers):
    tensors = {f"w{i}": torch.randn(1000 + i, 257, device="cuda") for i in range(12)}
    specs = [
        TensorSpec(name, tuple(t.shape), torch.bfloat16, ((0, t.numel()),))
        for name, t in tensors.items()
    ]
    layout = BucketLayout.plan(specs, bucket_bytes=2**20)
    broadcaster = BucketBroadcaster(layout, None, buffers=buffers, device="cuda")
    received = {
        name: torch.zeros(t.numel(), dtype=torch.bfloat16, device="cuda")
        for name, t in tensors.items()
    }
    for pieces in broadcaster.gather(lambda name: tensors[name].view(-1)):
        torch.cuda._sleep(20_000_000)  # the consumer's stream is late
        for piece in pieces:
            received[piece.name][piece.start : piece.start + piece.tensor.numel()].copy_(
                piece.tensor
            )
    for name, tensor in tensors.items():
        assert torch.equal(received[name], tensor.view(-1).bfloat16()), name

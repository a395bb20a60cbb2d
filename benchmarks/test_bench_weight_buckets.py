"""Weight buckets against a plain copy of the same bytes and against other ways to pack.

pytest benchmarks/test_bench_weight_buckets.py -s
"""

from __future__ import annotations

import functools

import harness
import pytest
import torch

from lightrft.kernels import capabilities, hash_tensors, pack, unpack

CASES = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
]
BUDGET_SECONDS = 2.0


def layer_shapes(hidden, kv, ffn):
    return [
        (hidden, hidden),
        (hidden,),
        (kv, hidden),
        (kv,),
        (kv, hidden),
        (kv,),
        (hidden, hidden),
        (ffn, hidden),
        (ffn, hidden),
        (hidden, ffn),
        (hidden,),
        (hidden,),
    ]


def model_shapes(device):
    """(name, shapes): about 50 MB of bfloat16 on the CPU, a whole 7B model on a GPU."""
    if device.type == "cuda":
        layers = [shape for _ in range(28) for shape in layer_shapes(3584, 512, 18944)]
        return "7B", [(152064, 3584), *layers, (3584,), (152064, 3584)]
    layers = [shape for _ in range(2) for shape in layer_shapes(896, 128, 4864)]
    return "two layers of 0.5B", [*layers, (896,)]


def make_buckets(device, source_dtype, out_dtype, bucket_bytes):
    """[(sources, bucket, offsets)]: tensors in order, no tensor split."""
    generator = torch.Generator(device).manual_seed(0)
    buckets, sources, offsets, position = [], [], [], 0
    _, shapes = model_shapes(device)
    for shape in shapes:
        tensor = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        num_bytes = tensor.numel() * out_dtype.itemsize
        if sources and position + num_bytes > bucket_bytes:
            buckets.append((sources, position, offsets))
            sources, offsets, position = [], [], 0
        sources.append(tensor.to(source_dtype))
        offsets.append(position)
        position += -(-num_bytes // 256) * 256
    buckets.append((sources, position, offsets))
    memory = torch.empty(max(size for _, size, _ in buckets), dtype=torch.uint8, device=device)
    return [(sources, memory[:size], offsets) for sources, size, offsets in buckets]


def pack_all(buckets, dtype, *, impl="auto"):
    for sources, bucket, offsets in buckets:
        pack(sources, bucket, offsets, [dtype] * len(sources), impl=impl)


def per_tensor(buckets, dtype):
    for sources, bucket, offsets in buckets:
        for source, offset in zip(sources, offsets, strict=True):
            stop = offset + source.numel() * dtype.itemsize
            bucket[offset:stop].view(dtype).copy_(source.view(-1))


def cast_then_cat(buckets, dtype):
    for sources, _, _ in buckets:
        torch.cat([source.to(dtype).view(-1).view(torch.uint8) for source in sources])


def foreach_copy(buckets, dtype):
    for sources, bucket, offsets in buckets:
        outs = [
            bucket[offset : offset + source.numel() * dtype.itemsize].view(dtype)
            for source, offset in zip(sources, offsets, strict=True)
        ]
        torch._foreach_copy_(outs, [source.view(-1) for source in sources])


def unpack_all(buckets, outs):
    for (_, bucket, offsets), tensors in zip(buckets, outs, strict=True):
        unpack(bucket, offsets, tensors)


@pytest.mark.parametrize("source_dtype, out_dtype", CASES)
def test_pack(benchmark, device, source_dtype, out_dtype):
    if device.type == "cuda" and source_dtype == out_dtype == torch.float32:
        pytest.skip("no such transfer in training")
    name, _ = model_shapes(device)
    buckets = make_buckets(device, source_dtype, out_dtype, 256 * 2**20)
    num_elements = sum(source.numel() for sources, _, _ in buckets for source in sources)
    num_bytes = num_elements * (source_dtype.itemsize + out_dtype.itemsize)
    # The floor reads and writes as many bytes in all, in one piece.
    half = torch.empty(num_bytes // 16, dtype=torch.int64, device=device).fill_(1)
    target = torch.empty_like(half)
    outs = [
        [torch.empty(source.shape, dtype=out_dtype, device=device) for source in sources]
        for sources, _, _ in buckets
    ]
    runs = {
        "floor: one copy": functools.partial(target.copy_, half),
        "ours": functools.partial(pack_all, buckets, out_dtype),
        "ours in torch": functools.partial(pack_all, buckets, out_dtype, impl="torch"),
        "copy per tensor": functools.partial(per_tensor, buckets, out_dtype),
        "cast, then cat": functools.partial(cast_then_cat, buckets, out_dtype),
        "_foreach_copy_": functools.partial(foreach_copy, buckets, out_dtype),
    }
    timings = harness.interleave(runs, device, BUDGET_SECONDS)
    report(benchmark, device, f"pack {name}, {source_dtype} -> {out_dtype}", timings, num_bytes)
    benchmark.pedantic(runs["ours"], rounds=1, iterations=1)
    # The benchmark is worth nothing if the bytes are wrong.
    for (sources, bucket, offsets), tensors in zip(buckets, outs, strict=True):
        pack(sources, bucket, offsets, [out_dtype] * len(sources))
        unpack(bucket, offsets, tensors)
        for source, tensor in zip(sources, tensors, strict=True):
            assert torch.equal(tensor, source.to(out_dtype))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unpack_and_hash(benchmark, device, dtype, num_threads):
    if device.type == "cuda" and num_threads != 1:
        pytest.skip("the device has threads of its own")
    name, _ = model_shapes(device)
    buckets = make_buckets(device, dtype, dtype, 256 * 2**20)
    outs = [
        [torch.empty(source.shape, dtype=dtype, device=device) for source in sources]
        for sources, _, _ in buckets
    ]
    sources = [source for sources, _, _ in buckets for source in sources]
    num_bytes = 2 * sum(t.numel() * dtype.itemsize for tensors in outs for t in tensors)
    half = torch.empty(num_bytes // 16, dtype=torch.int64, device=device).fill_(1)
    target = torch.empty_like(half)
    runs = {
        "floor: one copy": functools.partial(target.copy_, half),
        "ours unpack": functools.partial(unpack_all, buckets, outs),
        "ours hash": functools.partial(hash_tensors, sources),
    }
    earlier = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        timings = harness.interleave(runs, device, BUDGET_SECONDS)
    finally:
        torch.set_num_threads(earlier)
    title = f"unpack and hash {name}, {dtype}, {num_threads} threads"
    report(benchmark, device, title, timings, num_bytes)
    benchmark.pedantic(runs["ours unpack"], rounds=1, iterations=1)


def test_small_tensors(benchmark, device):
    """What one small tensor costs on the host: 1000 of 512 bytes, moved and hashed."""
    count, numel = 1000, 256
    dtype = torch.bfloat16
    sources = [torch.randn(numel, device=device) for _ in range(count)]
    outs = [torch.empty(numel, dtype=dtype, device=device) for _ in range(count)]
    offsets = [512 * index for index in range(count)]
    bucket = torch.empty(512 * count, dtype=torch.uint8, device=device)
    stacked = torch.empty(count * numel, device=device)
    target = torch.empty(count * numel, dtype=dtype, device=device)
    runs = {
        "floor: one copy": functools.partial(target.copy_, stacked),
        "ours pack": functools.partial(pack, sources, bucket, offsets, [dtype] * count),
        "ours unpack": functools.partial(unpack, bucket, offsets, outs),
        "ours hash": functools.partial(hash_tensors, sources, dtypes=[dtype] * count),
        "copy per tensor": lambda: [o.copy_(s) for s, o in zip(sources, outs, strict=True)],
    }
    timings = harness.interleave(runs, device, BUDGET_SECONDS)
    report(benchmark, device, f"{count} tensors of 512 bytes", timings, count * numel * 6)
    for name, timing in timings.items():
        print(f"  {name:<18} {timing.median / count * 1e6:9.2f} us a tensor")
    benchmark.pedantic(runs["ours pack"], rounds=1, iterations=1)


def report(benchmark, device, title, timings, num_bytes):
    best = timings["floor: one copy"].median
    native = "native" if capabilities().native_extension else "torch only"
    print(f"\n{harness.device_name(device)} ({native}), {title}")
    table = {}
    for name, timing in timings.items():
        table[name] = {
            "seconds": timing.median,
            "p10_p90": timing.spread,
            "gb_per_second": num_bytes / timing.median / 1e9,
            "percent_of_copy": 100 * best / timing.median,
        }
        print(
            f"  {name:<18} {timing.median * 1e3:9.2f} ms  {table[name]['gb_per_second']:8.1f} GB/s"
            f"  {table[name]['percent_of_copy']:5.0f} % of a copy"
        )
    benchmark.extra_info.update(title=title, providers=table)

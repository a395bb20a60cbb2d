"""A candidate forward pass in CuTe DSL for sm_90: not part of the package, and never run so far.

    python benchmarks/gpu/cute_forward.py          compiles it, without a GPU, and prints one line

Two blocks of a cluster compute 128 rows each of the same 256 columns and share every tile of the
weight by multicast. A warp copies, two warpgroups multiply and reduce their accumulators in
registers; the blocks stay and take one tile after the other. It writes the partials that
`lightrft.kernels.logprob.triton_launch.Partials` merges.

Nothing here can execute it: its values were compared with nothing. `test_bench_linear_logprob.py`
does that on a GPU, next to its time, where `nvidia-cutlass-dsl` is installed. Bias, softcap and the
backward pass are left out until that has shown that it is worth more.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    DUMP = tempfile.TemporaryDirectory()
    os.environ |= {
        "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_DUMP_DIR": DUMP.name,
    }

import cutlass
from cutlass import cute, pipeline, utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

ROWS, COLUMNS, SIZE, STAGES = 128, 256, 64, 4
# Blocks that share the tiles of the weight, and warps that read each of those.
CLUSTER = 2
CONSUMER_WARPS = 8
THREADS = 128 + 32 * CONSUMER_WARPS
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


class ForwardPartials:
    """Statistics of every 256 columns: partials [2 or 3, splits, rows].

    Args:
        needs_entropy: Whether there is the weighted sum, too.
    """

    def __init__(self, needs_entropy):
        self.needs_entropy = needs_entropy

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,
        weight: cute.Tensor,
        partials: cute.Tensor,
        scale: cutlass.Float32,
        num_clusters: cutlass.Int32,
    ):
        dtype = hidden.element_type
        mma = hopper_helpers.make_trivial_tiled_mma(
            dtype,
            dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (2, 1, 1),
            (64, COLUMNS),
        )
        tile = (ROWS, COLUMNS, SIZE)
        left_layout = hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, dtype, STAGES)
        right_layout = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, dtype, STAGES)
        copy_left, left = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            hidden,
            cute.slice_(left_layout, (None, None, 0)),
            (ROWS, SIZE),
            num_multicast=1,
        )
        copy_right, right = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(),
            weight,
            cute.slice_(right_layout, (None, None, 0)),
            (COLUMNS, SIZE),
            num_multicast=CLUSTER,
        )
        self.kernel(
            mma, copy_left, left, copy_right, right, partials, scale, left_layout, right_layout
        ).launch(grid=(CLUSTER, num_clusters, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1))

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        copy_left: cute.CopyAtom,
        left: cute.Tensor,
        copy_right: cute.CopyAtom,
        right: cute.Tensor,
        partials: cute.Tensor,
        scale: cutlass.Float32,
        left_layout: cute.ComposedLayout,
        right_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        rank, cluster, _ = cute.arch.block_idx()
        _, num_clusters, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp // 4)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, STAGES * 2]
            left: cute.struct.Align[
                cute.struct.MemRange[cutlass.BFloat16, cute.cosize(left_layout)], 1024
            ]
            right: cute.struct.Align[
                cute.struct.MemRange[cutlass.BFloat16, cute.cosize(right_layout)], 1024
            ]

        storage = utils.SmemAllocator().allocate(Storage)
        left_tiles = storage.left.get_tensor(left_layout.outer, swizzle=left_layout.inner)
        right_tiles = storage.right.get_tensor(right_layout.outer, swizzle=right_layout.inner)
        blocks_of_cluster = cute.make_layout((1, CLUSTER, 1, 1))
        pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            # A stage is free when the readers of both blocks have left it.
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, CONSUMER_WARPS * CLUSTER
            ),
            tx_count=(ROWS + COLUMNS) * SIZE * 2,
            cta_layout_vmnk=blocks_of_cluster,
        )
        num_rows, num_columns, size = left.shape[0], right.shape[0], left.shape[1]
        num_row_blocks = cute.ceil_div(num_rows, ROWS * CLUSTER)
        num_tiles = num_row_blocks * cute.ceil_div(num_columns, COLUMNS)
        num_steps = cute.ceil_div(size, SIZE)

        if group == 0:
            cute.arch.setmaxregister_decrease(40)
            if warp == 0:
                all_left = cute.local_tile(left, (ROWS, SIZE), (None, None))
                all_right = cute.local_tile(right, (COLUMNS, SIZE), (None, None))
                to_left, from_left = cpasync.tma_partition(
                    copy_left,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(left_tiles, 0, 2),
                    cute.group_modes(all_left, 0, 2),
                )
                # Each block fetches its half of a tile of the weight, for both.
                to_right, from_right = cpasync.tma_partition(
                    copy_right,
                    rank,
                    cute.make_layout(CLUSTER),
                    cute.group_modes(right_tiles, 0, 2),
                    cute.group_modes(all_right, 0, 2),
                )
                both = cpasync.create_tma_multicast_mask(
                    blocks_of_cluster, (0, rank, 0, 0), mcast_mode=1
                )
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
                for tile in cutlass.range(cluster, num_tiles, num_clusters):
                    row_block = (tile % num_row_blocks) * CLUSTER + rank
                    split = tile // num_row_blocks
                    for step in cutlass.range(num_steps):
                        pipe.producer_acquire(state)
                        arrived = pipe.producer_get_barrier(state)
                        cute.copy(
                            copy_left,
                            from_left[None, row_block, step],
                            to_left[None, state.index],
                            tma_bar_ptr=arrived,
                        )
                        cute.copy(
                            copy_right,
                            from_right[None, split, step],
                            to_right[None, state.index],
                            tma_bar_ptr=arrived,
                            mcast_mask=both,
                        )
                        pipe.producer_commit(state)
                        state.advance()
                pipe.producer_tail(state)
        if group != 0:
            cute.arch.setmaxregister_increase(232)
            own = mma.get_slice(thread - 128)
            places = own.partition_C(cute.make_identity_tensor((ROWS, COLUMNS)))
            left_parts = mma.make_fragment_A(own.partition_A(left_tiles))
            right_parts = mma.make_fragment_B(own.partition_B(right_tiles))
            products = cute.make_rmem_tensor(places.shape, cutlass.Float32)
            reading = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
            leaving = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
            for tile in cutlass.range(cluster, num_tiles, num_clusters):
                row_block = (tile % num_row_blocks) * CLUSTER + rank
                split = tile // num_row_blocks
                mma.set(warpgroup.Field.ACCUMULATE, False)
                for step in cutlass.range(num_steps):
                    pipe.consumer_wait(reading)
                    warpgroup.fence()
                    for part in cutlass.range_constexpr(cute.size(left_parts, mode=[2])):
                        stage = (None, None, part, reading.index)
                        cute.gemm(mma, products, left_parts[stage], right_parts[stage], products)
                        mma.set(warpgroup.Field.ACCUMULATE, True)
                    warpgroup.commit_group()
                    reading.advance()
                    # One product is under way while the next one is issued.
                    warpgroup.wait_group(1)
                    if step > 0:
                        pipe.consumer_release(leaving)
                        leaving.advance()
                warpgroup.wait_group(0)
                pipe.consumer_release(leaving)
                leaving.advance()
                self.store(
                    partials,
                    products,
                    places,
                    row_block,
                    split,
                    scale,
                    num_rows,
                    num_columns,
                    thread,
                )

    @cute.jit
    def store(
        self, partials, products, places, row_block, split, scale, num_rows, num_columns, thread
    ):
        """Reduces a tile; a thread has two rows, and two columns out of every eight."""
        first = split * COLUMNS
        if first + COLUMNS > num_columns:
            for index in cutlass.range_constexpr(cute.size(products)):
                if first + places[index][1] >= num_columns:
                    products[index] = -cutlass.Float32.inf
        factor = scale * LOG2E
        for pair in cutlass.range_constexpr(2):
            maximum = -cutlass.Float32.inf
            for column in cutlass.range_constexpr(COLUMNS // 8):
                for half in cutlass.range_constexpr(2):
                    maximum = cute.arch.fmax(maximum, products[(half, pair, column), 0, 0])
            for offset in (1, 2):
                maximum = cute.arch.fmax(
                    maximum, cute.arch.shuffle_sync_bfly(maximum, offset=offset)
                )
            reference = maximum * factor
            if maximum == -cutlass.Float32.inf:
                reference = cutlass.Float32(0.0)
            total, weighted = cutlass.Float32(0.0), cutlass.Float32(0.0)
            for column in cutlass.range_constexpr(COLUMNS // 8):
                for half in cutlass.range_constexpr(2):
                    shifted = products[(half, pair, column), 0, 0] * factor - reference
                    share = cute.arch.exp2(shifted)
                    total += share
                    if cutlass.const_expr(self.needs_entropy):
                        # 0 * -inf is not a number, 0 times a very negative number is 0.
                        weighted += share * cute.arch.fmax(shifted, cutlass.Float32(-1e30))
            for offset in (1, 2):
                total += cute.arch.shuffle_sync_bfly(total, offset=offset)
                if cutlass.const_expr(self.needs_entropy):
                    weighted += cute.arch.shuffle_sync_bfly(weighted, offset=offset)
            row = row_block * ROWS + places[(0, pair, 0), 0, 0][0]
            if thread % 4 == 0 and row < num_rows:
                partials[0, split, row] = maximum * scale
                partials[1, split, row] = total
                if cutlass.const_expr(self.needs_entropy):
                    partials[2, split, row] = weighted * LN2


_compiled: dict[tuple[object, ...], object] = {}


def logprobs(hidden, weight, targets):
    """Log-probabilities of targets [tokens], without gradients: bfloat16 on an H100 or H200.

    Args:
        hidden: [tokens, hidden].
        weight: [vocab, hidden].
        targets: [tokens] int64.
    """
    import torch

    from lightrft.kernels.logprob.triton_launch import Partials, target_products

    num_splits = -(-len(weight) // COLUMNS)
    partials = Partials.allocate(num_splits, len(hidden), hidden, needs_entropy=False)
    cores = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    tensors = [from_dlpack(t, assumed_align=16) for t in (hidden, weight, partials.values)]
    numbers = (cutlass.Float32(1.0), cutlass.Int32(cores // CLUSTER))
    key = (*hidden.shape, *weight.shape)
    if key not in _compiled:
        _compiled[key] = cute.compile(ForwardPartials(False), *tensors, *numbers)
    _compiled[key](*tensors, *numbers)
    return partials.merge(target_products(hidden, weight, targets)).logprobs


def main():
    """Compiles it for a head whose last columns fill half of a tile."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import machine_code

    num_rows, size, vocab = 8192, 3584, 151936
    num_splits = -(-vocab // COLUMNS)
    bf16 = cutlass.BFloat16
    hidden = make_fake_tensor(bf16, (num_rows, size), (size, 1), assumed_align=16)
    weight = make_fake_tensor(bf16, (vocab, size), (size, 1), assumed_align=16)
    partials = make_fake_tensor(
        cutlass.Float32, (3, num_splits, num_rows), (num_splits * num_rows, num_rows, 1)
    )
    for needs_entropy in (False, True):
        for old in Path(DUMP.name).glob("*"):
            old.unlink()
        cute.compile(
            ForwardPartials(needs_entropy),
            hidden,
            weight,
            partials,
            cutlass.Float32(1.0),
            cutlass.Int32(66),
        )
        (cubin,) = Path(DUMP.name).glob("*.cubin")
        usage = machine_code.run_cuobjdump("--dump-resource-usage", cubin)
        code = machine_code.run_cuobjdump("-sass", cubin)
        row = {
            "case": f"sm_90 cute_forward bf16 {'entropy' if needs_entropy else 'plain'}",
            "cutlass-dsl": cutlass.__version__,
            **machine_code.read_usage(usage),
            **machine_code.read_code(code),
            "multicasts": code.count("UTMALDG.2D.MULTICAST"),
        }
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

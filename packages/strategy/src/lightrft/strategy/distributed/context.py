"""Processes, devices, groups and collectives: the part of a strategy that knows no model."""

from __future__ import annotations

import dataclasses
import random
import sys
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightrft.strategy.config import ConfigError, StrategyConfig
from lightrft.strategy.distributed import collectives, process_groups
from lightrft.strategy.distributed.collectives import ALONE, Group
from lightrft.strategy.distributed.memory import MemoryReport, measure_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from lightrft.strategy.prepared import Arguments

T = TypeVar("T")


class DistributedContext:
    """What a rank needs before there is any model; see `StrategyBase` for the arguments."""

    is_fsdp: ClassVar[bool | None] = None
    """Replaces the configuration's `fsdp`, since a strategy may be built without the factory."""

    def __init__(
        self,
        seed: int,
        max_norm: float,
        micro_train_batch_size: int,
        train_batch_size: int,
        args: Arguments | None = None,
    ) -> None:
        self.seed = seed
        self.max_norm = max_norm
        self.micro_train_batch_size = micro_train_batch_size
        self.train_batch_size = train_batch_size
        self.args = args
        self.config = dataclasses.replace(
            StrategyConfig.from_args(args),
            seed=seed,
            max_norm=max_norm,
            micro_train_batch_size=micro_train_batch_size,
            train_batch_size=train_batch_size,
        )
        if self.is_fsdp is not None:
            self.config.fsdp = self.is_fsdp
        self.adam_offload = self.config.adam_offload
        self.zpg = self.config.zpg
        self.grad_accum_dtype = self.config.grad_accum_dtype
        self.overlap_comm = self.config.overlap_comm
        self._owns_process_group = False
        self._group_sizes: dict[str, int] | None = None
        self.sp_mesh_device: DeviceMesh | None = None
        self.sp_group: ProcessGroup | None = None
        self.dp_group: ProcessGroup | None = None
        self._check_options()

    @property
    def _timeout(self) -> timedelta:
        return timedelta(minutes=self.config.timeout_minutes)

    @property
    def world_group(self) -> Group:
        """The group of all ranks this strategy trains on."""
        return None

    @property
    def num_averaging_ranks(self) -> int:
        """Ranks over which this backend averages gradients."""
        return self.world_size

    @property
    def num_data_ranks(self) -> int:
        """Data-parallel groups: with sequence parallelism `sp_size` ranks share their samples."""
        return self.world_size // self.config.sp_size

    @property
    def data_rank(self) -> int:
        """Which data-parallel group this rank belongs to."""
        return self.get_rank() // self.config.sp_size

    def _group_or_alone(self, group: ProcessGroup | None) -> Group:
        return ALONE if group is None else group

    def _check_options(self) -> None:
        """Names options without effect once, at the start."""
        idle = self.config.unused_options()
        if idle and self.config.strict:
            raise ConfigError("options without effect (strict):\n  " + "\n  ".join(idle))
        self._idle_options = idle

    def set_seed(self, seed: int) -> None:
        """Seeds random, NumPy and torch (CPU and all GPUs) with the same value on every rank."""
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - user code may use the global generator
        torch.manual_seed(seed)

    def setup_distributed(
        self, timeout: timedelta | None = None, num_gpu_per_node: int | None = None
    ) -> None:
        """Seeds, chooses the device, starts the process group, checks sizes. Idempotent.

        Args:
            timeout: Deadline of the start and of every collective.
            num_gpu_per_node: To derive the local rank where LOCAL_RANK is not set; None detects.

        Raises:
            RuntimeError: RANK or WORLD_SIZE is missing; the message names it.
            ValueError: Batch sizes or `sp_size` do not fit the number of ranks, or group sizes
                were changed after the groups had been formed.
        """
        self.set_seed(self.seed)
        self.engine_type = self.config.engine_type
        gpus = torch.cuda.device_count() if num_gpu_per_node is None else num_gpu_per_node
        self.config.local_rank = process_groups.resolve_local_rank(self.config.local_rank, gpus)
        self.device = process_groups.resolve_device(self.config.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._owns_process_group |= self._start_processes(timeout)
        self.world_size = collectives.group_size(self.world_group)
        self._check_group_sizes()
        process_groups.check_divides(self.world_size, "sp_size", self.config.sp_size)
        process_groups.check_divides(self.world_size, "engine_tp_size", self.config.engine_tp_size)
        self.accumulated_gradient = process_groups.accumulation_steps(
            train_batch_size=self.train_batch_size,
            micro_train_batch_size=self.micro_train_batch_size,
            num_data_ranks=self.world_size // self.config.sp_size,
            world_size=self.world_size,
        )
        if self.config.sp_size > 1 and self.sp_mesh_device is None:
            self._setup_sequence_parallel()
        for text in self._idle_options:
            self.print(f"warning: option without effect: {text}")
        self._idle_options = []

    def _check_group_sizes(self) -> None:
        """Groups live as long as the strategy."""
        sizes = {"sp_size": self.config.sp_size, "engine_tp_size": self.config.engine_tp_size}
        if self._group_sizes is None:
            self._group_sizes = sizes
        for name, formed in self._group_sizes.items():
            if sizes[name] != formed:
                raise ValueError(
                    f"setup_distributed formed groups with {name} {formed} on {self.world_size} "
                    f"ranks already, now {name} is {sizes[name]}: groups cannot change; close() "
                    "this strategy and create another one"
                )

    def _start_processes(self, timeout: timedelta | None) -> bool:
        return process_groups.start_process_group(timeout)

    def _create_engine_groups(self) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        return process_groups.create_sub_group(self.config.engine_tp_size, timeout=self._timeout)

    def _setup_sequence_parallel(self) -> None:
        shape = (self.world_size // self.config.sp_size, self.config.sp_size)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "sp"))
        self.sp_mesh_device = mesh
        self.sp_group = mesh["sp"].get_group()
        # One rank of each data-parallel group.
        self.dp_group = mesh["dp"].get_group()
        self.print(f"sequence parallelism: mesh dp x sp = {shape[0]} x {shape[1]}")

    def close(self) -> None:
        """Ends the process group if this strategy started it. Idempotent."""
        if self._owns_process_group and dist.is_initialized():
            self._end_processes()
        self._owns_process_group = False

    def _end_processes(self) -> None:
        # DeepSpeed ends the default group with its own.
        if dist.is_initialized():
            dist.destroy_process_group()

    @classmethod
    def is_rank_0(cls) -> bool:
        """Whether this is the first of all ranks."""
        return collectives.group_rank() == 0

    def get_rank(self) -> int:
        """This rank among all ranks."""
        return collectives.group_rank(self.world_group)

    @classmethod
    def print(cls, *msg: object) -> None:
        """Prints with a time stamp, on rank 0 only."""
        if cls.is_rank_0():
            stamp = datetime.now().strftime("%m-%d %H:%M:%S")
            text = " ".join(str(part) for part in msg)
            sys.stdout.write(f"[StrategyINFO {stamp}]  {text}\n")
            sys.stdout.flush()

    @classmethod
    def report_memory(cls, prefix: str = "") -> MemoryReport:
        """Prints (on rank 0) and returns the memory in use; on a CPU that of the process."""
        report = measure_memory()
        if cls.is_rank_0():
            sys.stdout.write(f"MEMORY STATUS: {prefix}, {report}\n")
        return report

    @classmethod
    def sync_and_clear_cache(cls) -> None:
        """Waits for the GPU, then for all ranks, then frees cached GPU memory."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        cls._barrier_all()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @classmethod
    def _barrier_all(cls) -> None:
        collectives.barrier()

    def barrier(self) -> None:
        """Waits until every rank arrived."""
        collectives.barrier(self.world_group)

    @overload
    def all_reduce(self, data: int, op: str = "mean") -> float: ...

    @overload
    def all_reduce(self, data: T, op: str = "mean") -> T: ...

    def all_reduce(self, data: object, op: str = "mean") -> object:
        """Reduces a tensor, a number or a nested dict over all ranks in one collective.

        Args:
            data: Left unchanged.
            op: "mean", "max" or "sum".

        Returns:
            The same structure, type and device. Integers stay exact; a mean of integers is a
            float.

        Raises:
            AssertionError: `op` is none of these.
            ValueError: Ranks passed different keys, types or shapes (raised on every rank).
        """
        return collectives.all_reduce(cast("collectives.Tree", data), op, group=self.world_group)

    def reduce_over_data(self, data: T, op: str = "mean") -> T:
        """Like `all_reduce`, counting ranks that share their samples once."""
        group = self.world_group if self.dp_group is None else self.dp_group
        reduced = collectives.all_reduce(cast("collectives.Tree", data), op, group=group)
        return cast("T", reduced)

    @overload
    def all_gather(self, data: Tensor | float) -> Tensor: ...

    @overload
    def all_gather(self, data: Mapping[str, collectives.Tree]) -> dict[str, Tensor]: ...

    def all_gather(self, data: collectives.Tree) -> object:
        """Concatenates every rank's values in rank order; a number gives a 1-D tensor.

        Tensors may differ in their first dimension. Dicts may be nested.

        Raises:
            ValueError: Ranks passed different keys, types or trailing shapes (on every rank).
        """
        return collectives.all_gather(data, group=self.world_group)

    def gather_objects(self, item: T, group: ProcessGroup | None = None) -> list[T]:
        """Every rank's plain Python object, by rank, on every rank of the group."""
        return collectives.gather_objects(item, self.world_group if group is None else group)

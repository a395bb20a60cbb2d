"""Processes, devices, groups, collectives and lines: a strategy without its models."""

import copy
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol, Self, TypeVar, cast, overload

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightrft.config import MachineOptions
from lightrft.strategy.distributed import collectives, process_groups
from lightrft.strategy.distributed.collectives import ALONE, Group

T = TypeVar("T")
logger = logging.getLogger(__name__)
# Function of a line and whether it is a detail: memory, sleep, weight sync.
ConsoleSink = Callable[[str, bool], None]
_sinks: list[ConsoleSink] = []
_progress: list[tuple[str, int, int]] = []


@contextmanager
def console_sink(sink: ConsoleSink) -> Iterator[None]:
    """Pass every line to `sink` while the body runs; the innermost counts.

    Work that was in progress at the end has failed: the next run does not show it.
    """
    _sinks.append(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)
        _progress.clear()


def write_line(text: str, *, is_detail: bool = False, is_stamped: bool = True) -> None:
    """Write a line; on standard output it begins with the time if `is_stamped`.

    Without a sink, a detail goes to the log alone.
    """
    if _sinks:
        _sinks[-1](text, is_detail)
        return
    if is_detail:
        logger.info("%s", text)
        return
    stamp = f"[StrategyINFO {datetime.now():%m-%d %H:%M:%S}]  " if is_stamped else ""
    sys.stdout.write(f"{stamp}{text}\n")
    sys.stdout.flush()


def with_progress(items: Sequence[T], name: str) -> Iterator[T]:
    """Yield the items; meanwhile `current_progress` reports how many are done."""
    for done, item in enumerate(items):
        report_progress(name, done, len(items))
        yield item
    _progress.clear()


def report_progress(name: str, done: int, total: int) -> None:
    """Record the progress of a long piece of work; a `total` of 0 ends it."""
    _progress[:] = [(name, done, total)] if total else []


def current_progress() -> tuple[str, int, int] | None:
    """Return name, done and total of the work in progress, or None."""
    return _progress[-1] if _progress else None


GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory in use, in bytes.

    Args:
        device: "cuda:0", "cpu", ...
        driver_used_bytes: Used on the device by everybody; on a CPU the machine's used memory.
        allocated_bytes: Allocated by torch on the device; on a CPU this process' resident memory.
        total_bytes: Memory of the device or machine.
    """

    device: str
    driver_used_bytes: int
    allocated_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        return (
            f"DRIVER_USED={self.driver_used_bytes / GIGABYTE:.2f} GB, "
            f"ALLOCATED={self.allocated_bytes / GIGABYTE:.2f} GB"
        )


class RowExchange(Protocol):
    """Ranks that send each other bytes."""

    @property
    def rank(self) -> int:
        """Number of this process."""
        ...

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send every rank its part, and return the parts that this rank received; both by rank."""
        ...


def measure_memory() -> MemoryReport:
    """Measure the current CUDA device, or the process if there is none."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        device = f"cuda:{torch.cuda.current_device()}"
        return MemoryReport(device, total - free, torch.cuda.memory_allocated(), total)
    machine = psutil.virtual_memory()
    resident = psutil.Process().memory_info().rss
    return MemoryReport("cpu", machine.total - machine.available, resident, machine.total)


def print_on_first_rank(group: Group, *msg: object, is_detail: bool = False) -> None:
    """Print with a time stamp on the first rank of the group; see `write_line`."""
    if collectives.group_rank(group) == 0:
        write_line(" ".join(str(part) for part in msg), is_detail=is_detail)


def report_memory(group: Group, prefix: str, *, is_detail: bool = False) -> MemoryReport:
    """Print (on the first rank) and return the memory in use; on a CPU that of the process."""
    report = measure_memory()
    if collectives.group_rank(group) == 0:
        line = f"MEMORY STATUS: {prefix}, {report}"
        write_line(line, is_detail=is_detail, is_stamped=False)
    return report


def seed_generators(seed: int) -> None:
    """Seed random, NumPy and torch (CPU and all GPUs)."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - user code may use the global generator
    torch.manual_seed(seed)


def synchronize_and_free(group: Group) -> None:
    """Wait for the GPU, then for all ranks, then free cached GPU memory."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    collectives.barrier(group)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class DistributedContext:
    """The process among its ranks: device, groups and collectives; usable once `start` has run.

    Args:
        config: Options of the strategy.
        world_group: Ranks that train together; None is all ranks, `ALONE` this process.

    Attributes:
        device: Device of this rank; the CPU before `start`.
        computes_in_bf16: Whether forward and backward passes are in bfloat16.
        world_size: Ranks that train together.
        sp_mesh, sp_group, dp_group: The mesh dp x sp, the ranks that share a sequence and one rank
            of each data-parallel group; None without sequence parallelism.
        engine_mp_group, engine_dp_group: Ranks that share an engine, and this rank's peers in the
            other engines.
        chosen_options: Options of the run that the machines decided, each with the reason.
        planned_bytes: Peak of torch's memory in each phase, as planned; {} where nothing is.
    """

    def __init__(self, config: MachineOptions, world_group: Group) -> None:
        self.config = config
        self.world_group = world_group
        self._compute_on(torch.device("cpu"))
        self.world_size = 1
        self.sp_mesh: DeviceMesh | None = None
        self.sp_group: ProcessGroup | None = None
        self.dp_group: ProcessGroup | None = None
        self.engine_mp_group: ProcessGroup | None = None
        self.engine_dp_group: ProcessGroup | None = None
        self.chosen_options: dict[str, str] = {}
        self.planned_bytes: Mapping[str, float] = {}
        self._owns_process_group = False
        self._formed_sizes: dict[str, int] | None = None

    @property
    def timeout(self) -> timedelta:
        """Deadline of every phase and collective."""
        return timedelta(minutes=self.config.timeout_minutes)

    @property
    def rank(self) -> int:
        """Number of this rank among those that train together."""
        return collectives.group_rank(self.world_group)

    @property
    def num_data_ranks(self) -> int:
        """Data-parallel groups: with sequence parallelism `sp_size` ranks share their samples."""
        return self.world_size // self.config.sp_size

    @property
    def data_rank(self) -> int:
        """Number of the data-parallel group that this rank belongs to."""
        return self.rank // self.config.sp_size

    @property
    def data_group(self) -> Group:
        """One rank of each data-parallel group."""
        return self.world_group if self.dp_group is None else self.dp_group

    @property
    def engine_group(self) -> Group:
        """The ranks that share this rank's engine."""
        return ALONE if self.engine_mp_group is None else self.engine_mp_group

    @property
    def has_gpu(self) -> bool:
        """Return whether this rank computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of forward and backward passes."""
        return torch.bfloat16 if self.computes_in_bf16 else torch.float32

    def _compute_on(self, device: torch.device) -> None:
        self.device = device
        self.computes_in_bf16 = self.config.computes_in_bf16(has_gpu=self.has_gpu)

    def start(self, timeout: timedelta | None, num_gpu_per_node: int | None) -> None:
        """Start the process group and divide the ranks; see `StrategyBase.setup_distributed`."""
        config = self.config
        seed_generators(config.seed)
        gpus = torch.cuda.device_count() if num_gpu_per_node is None else num_gpu_per_node
        config.local_rank = process_groups.resolve_local_rank(config.local_rank, gpus)
        self._compute_on(
            process_groups.resolve_device(config.local_rank, devices_shared=config.devices_shared)
        )
        if self.has_gpu:
            torch.cuda.set_device(self.device)
            # By default cuBLAS may sum the parts of a product in 16 bits; see lightrft.kernels.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        if self.world_group is not ALONE:
            self._owns_process_group |= process_groups.start_process_group(timeout)
        self.world_size = collectives.group_size(self.world_group)
        self._check_sizes()
        if config.devices_shared and self.has_gpu:
            self.print(
                "devices_shared: ranks that generate use the GPUs of ranks that train. This is for "
                "trials: slower, and the memory of both lies on one device"
            )

    def _check_sizes(self) -> None:
        """Check that sizes fit: groups live as long as the strategy."""
        config = self.config
        sizes = {"sp_size": config.sp_size, "engine_tp_size": config.engine_tp_size}
        self._formed_sizes = self._formed_sizes or sizes
        for name, formed in self._formed_sizes.items():
            if sizes[name] != formed:
                raise ValueError(
                    f"setup_distributed formed groups with {name} {formed} on {self.world_size} "
                    f"ranks already, now {name} is {sizes[name]}: groups cannot change; close() "
                    "this strategy and create another one"
                )
            process_groups.check_divides(self.world_size, name, formed)

    def form_groups(self) -> None:
        """Divide the ranks by sequences and by engines; once."""
        size = self.config.sp_size
        if size > 1 and self.sp_mesh is None:
            shape = (self.world_size // size, size)
            self.sp_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "sp"))
            self.sp_group = self.sp_mesh["sp"].get_group()
            self.dp_group = self.sp_mesh["dp"].get_group()
            self.print(f"sequence parallelism: mesh dp x sp = {shape[0]} x {shape[1]}")
        if self.world_group is not ALONE and self.engine_mp_group is None:
            self.engine_mp_group, self.engine_dp_group = process_groups.create_sub_group(
                self.config.engine_tp_size, timeout=self.timeout
            )

    def beside(self) -> Self:
        """Return these ranks on separate process groups, for work beside training. Collective.

        Collectives of the two may come in different orders on different ranks, as long as each
        keeps its order. `world_group`, `engine_mp_group` and `dp_group` are separate; the groups of
        one sequence, whose ranks call a model together, are the same.
        """
        if self.world_size == 1:
            return self
        other = copy.copy(self)
        other._owns_process_group = False
        world = process_groups.separate_group(None, timeout=self.timeout)
        other.world_group = other.engine_mp_group = world
        if self.config.engine_tp_size < self.world_size:
            other.engine_mp_group = process_groups.separate_group(
                self.engine_mp_group, timeout=self.timeout
            )
        if self.dp_group is not None:
            other.dp_group = process_groups.separate_group(self.dp_group, timeout=self.timeout)
        return other

    def close(self, before_end: Callable[[], None]) -> None:
        """End the process group if this context started it. Idempotent.

        Args:
            before_end: Function that ends what others built on the process group.
        """
        if self._owns_process_group and dist.is_initialized():
            before_end()
            # DeepSpeed ends the default group together with its groups.
            if dist.is_initialized():
                dist.destroy_process_group()
        self._owns_process_group = False

    def is_rank_0(self) -> bool:
        """Return whether this is the first of the ranks."""
        return self.rank == 0

    def print(self, *msg: object) -> None:
        """Print with a time stamp, on the first rank only."""
        print_on_first_rank(self.world_group, *msg)

    def print_detail(self, *msg: object) -> None:
        """Print a detail (memory, sleep, weight sync), which a run keeps in its log."""
        print_on_first_rank(self.world_group, *msg, is_detail=True)

    def note_memory(self, prefix: str) -> MemoryReport:
        """Report memory as a detail; see `StrategyBase.report_memory`."""
        return report_memory(self.world_group, prefix, is_detail=True)

    def barrier(self) -> None:
        """Wait until every rank arrived."""
        collectives.barrier(self.world_group)

    def free_memory(self) -> None:
        """Wait for all ranks and free memory; see `StrategyBase.sync_and_clear_cache`."""
        synchronize_and_free(self.world_group)

    @overload
    def all_reduce(self, data: int, op: str = "mean") -> float: ...

    @overload
    def all_reduce(self, data: T, op: str = "mean") -> T: ...

    def all_reduce(self, data: object, op: str = "mean") -> object:
        """Reduce a tensor, a number or a nested dict over all ranks in one collective.

        Args:
            data: Values, left unchanged.
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
        """Reduce like `all_reduce`, counting ranks that share their samples once."""
        tree = cast("collectives.Tree", data)
        return cast("T", collectives.all_reduce(tree, op, group=self.data_group))

    @overload
    def all_gather(self, data: Tensor | float) -> Tensor: ...

    @overload
    def all_gather(self, data: Mapping[str, collectives.Tree]) -> dict[str, Tensor]: ...

    def all_gather(self, data: collectives.Tree) -> object:
        """Concatenate every rank's values in rank order; a number gives a 1-D tensor.

        Tensors may differ in their first dimension. Dicts may be nested.

        Raises:
            ValueError: Ranks passed different keys, types or trailing shapes (on every rank).
        """
        return collectives.all_gather(data, group=self.world_group)

    def gather_objects(self, item: T, group: ProcessGroup | None = None) -> list[T]:
        """Return every rank's plain Python object, by rank, on all ranks of the group."""
        return collectives.gather_objects(item, self.world_group if group is None else group)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank, on every rank; lengths may differ."""
        return collectives.gather_bytes(data, self.world_group)

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send every rank its part, and return the parts that this rank received; both by rank."""
        return collectives.exchange_bytes(parts, self.world_group)

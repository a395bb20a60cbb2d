"""Starting torch.distributed and dividing the ranks into groups."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightrft.config.options import ConfigError
from lightrft.strategy.distributed.network import (
    VARIABLE,
    allow_open_files,
    choose_gloo_interface,
)
from lightrft.strategy.distributed.process_end import ended_by_signals

DEFAULT_TIMEOUT = timedelta(minutes=60)
# By address: the connection, and how many groups were started through it.
_STORES: dict[str, tuple[dist.Store, Iterator[int]]] = {}
# The side of this process; empty where all ranks of the launch train.
_SIDES: list[Side] = []


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two parts of a launch: the first ranks train, the last ones only generate.

    Each part is a separate world: its ranks count from 0, and its default process group holds
    them alone.

    Args:
        launch_rank: Number of this process in the launch.
        num_training, num_generating: Ranks of both parts.
    """

    launch_rank: int
    num_training: int
    num_generating: int

    @property
    def generates(self) -> bool:
        """Return whether this process only generates."""
        return self.launch_rank >= self.num_training

    @property
    def rank(self) -> int:
        """Number of this process within its part."""
        return self.launch_rank - self.num_training if self.generates else self.launch_rank

    @property
    def world_size(self) -> int:
        """Ranks of this part."""
        return self.num_generating if self.generates else self.num_training

    def describe(self, launch_rank: int) -> str:
        """Return a rank of the launch with its work."""
        role = "generates" if launch_rank >= self.num_training else "trains"
        return f"rank {launch_rank}, which {role}"


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """The launcher's variables about this process, within its side.

    Raises (`read`):
        RuntimeError: A variable is missing or not a number; the message names all of them.
    """

    rank: int
    world_size: int
    init_method: str | None

    @classmethod
    def read(cls) -> LaunchEnvironment:
        """Read RANK, WORLD_SIZE, MASTER_ADDR (localhost) and MASTER_PORT (2222).

        Without RANK and WORLD_SIZE there was no launcher: the process is the only rank.
        """
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
        if len(missing) == 2:
            return cls(0, 1, None)
        if missing:
            raise RuntimeError(
                f"Could not find {missing[0]} in the torch environment: start several processes "
                "with `torchrun --nproc-per-node=N ...`; one process needs neither RANK nor "
                "WORLD_SIZE"
            )
        host = os.environ.get("MASTER_ADDR", "localhost")
        port = os.environ.get("MASTER_PORT", "2222")
        rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        if not (rank.isdigit() and world_size.isdigit() and int(rank) < int(world_size)):
            raise RuntimeError(
                f"RANK must be in [0, WORLD_SIZE): got RANK={rank!r}, WORLD_SIZE={world_size!r}"
            )
        for side in _SIDES:
            return cls(side.rank, side.world_size, f"tcp://{host}:{port}")
        return cls(int(rank), int(world_size), f"tcp://{host}:{port}")


def take_side(num_generating: int, timeout: timedelta) -> tuple[Side, dist.Store]:
    """Make the last ranks of the launch a separate world, before any process group exists.

    Returns:
        Side of this process, and a store that both sides share.

    Raises:
        ValueError: No rank would be left to train.
    """
    launch = LaunchEnvironment.read()
    num_training = launch.world_size - num_generating
    if launch.init_method is None or num_training < 1:
        raise ValueError(
            f"rollout_ranks {num_generating} leaves no rank to train: got {launch.world_size} "
            f"processes, expected {num_generating + 1} or more"
        )
    side = Side(launch.rank, num_training, num_generating)
    with ended_by_signals():
        store = _fresh_store(launch, timeout)
    side_store = dist.PrefixStore("generate" if side.generates else "train", store)
    _STORES[launch.init_method] = side_store, itertools.count()
    _SIDES[:] = [side]
    return side, dist.PrefixStore("bridge", store)


def leave_side() -> None:
    """Make this process one of the whole launch again, with a new store."""
    _SIDES.clear()
    _STORES.clear()


def resolve_local_rank(configured: int, num_gpu_per_node: int) -> int:
    """Return the index of this process' device on its node.

    An explicit value wins; then LOCAL_RANK (torchrun, Slurm); then RANK modulo the GPUs of a
    node; -1 if nothing is known.
    """
    if configured != -1:
        return configured
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if "RANK" in os.environ:
        return int(os.environ["RANK"]) % max(1, num_gpu_per_node)
    return -1


def resolve_device(local_rank: int, *, devices_shared: bool = False) -> torch.device:
    """Return the GPU of this local rank (0 if unknown) if there are GPUs, else the CPU.

    Args:
        local_rank: Number of this process on its node.
        devices_shared: Whether a rank that only generates may share the GPU of a training rank.

    Raises:
        ConfigError: The node has fewer GPUs than local ranks, or than those of one side.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = max(0, local_rank), torch.cuda.device_count()
    # NCCL, which each side uses alone, refuses two ranks of one GPU.
    fits = devices_shared and all(side.world_size <= count for side in _SIDES)
    if index >= count and not (fits and _SIDES):
        remedy = f"start at most {count} processes per node"
        if _SIDES:
            remedy += (
                ", or for a trial add devices_shared: ranks that only generate then use the GPUs "
                f"of those that train, at most {count} ranks on each side"
            )
        raise ConfigError(f"local rank {index} has no GPU: this node shows {count}; {remedy}")
    return torch.device("cuda", index % count)


def _fresh_store(launch: LaunchEnvironment, timeout: timedelta) -> dist.Store:
    """Return the store where the ranks meet, without the keys of a destroyed group.

    The connection is kept for the life of the process: a rank that starts its next group early
    must not meet the dying server of the last one.
    """
    interface = choose_gloo_interface()
    if interface is not None:
        os.environ[VARIABLE] = interface
    if launch.init_method is None or launch.world_size == 1:
        return dist.HashStore()  # one process needs no port, which another may take first
    if launch.init_method not in _STORES:
        rendezvous = dist.rendezvous(
            launch.init_method, launch.rank, launch.world_size, timeout=timeout
        )
        _STORES[launch.init_method] = (next(iter(rendezvous))[0], itertools.count())
    store, starts = _STORES[launch.init_method]
    return dist.PrefixStore(f"start_{next(starts)}", store)


def start_process_group(timeout: timedelta | None) -> bool:
    """Start the default process group unless one exists.

    Returns:
        Whether this call started it.

    Raises:
        RuntimeError: RANK or WORLD_SIZE is missing, or a group of another size or with another
            rank runs already.
    """
    if dist.is_initialized():
        _check_running_group()
        return False
    launch = LaunchEnvironment.read()
    allow_open_files(launch.world_size)
    with ended_by_signals():
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=_fresh_store(launch, timeout or DEFAULT_TIMEOUT),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout or DEFAULT_TIMEOUT,
        )
    return True


def _check_running_group() -> None:
    """Raise a RuntimeError if the launcher's variables contradict the running group."""
    actual = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    launch = LaunchEnvironment.read() if _SIDES else None
    wanted = {name: os.environ.get(name, str(value)) for name, value in actual.items()}
    if launch is not None:
        wanted = {"RANK": str(launch.rank), "WORLD_SIZE": str(launch.world_size)}
    if any(wanted[name] != str(value) for name, value in actual.items()):
        raise RuntimeError(
            f"torch.distributed runs with rank {actual['RANK']} of {actual['WORLD_SIZE']} already, "
            f"but the environment says RANK={wanted['RANK']}, WORLD_SIZE={wanted['WORLD_SIZE']}: "
            "close() the strategy that started it (or torch.distributed.destroy_process_group()) "
            "first, or correct the variables"
        )


def check_divides(world_size: int, name: str, size: int) -> None:
    """Raise a ValueError unless `size` ranks per group divide all ranks evenly."""
    if size < 1 or world_size % size != 0:
        legal = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"world_size must be divisible by {name}: got world_size {world_size} and {name} "
            f"{size}; legal values: {legal}"
        )


def engine_group_ranks(world_size: int, engine_tp_size: int) -> tuple[list[list[int]], ...]:
    """Return ranks that share an engine, and ranks that hold the same part of different engines.

    Example: 4 ranks, tp 2 -> ([[0, 1], [2, 3]], [[0, 2], [1, 3]]).
    """
    num_engines = world_size // engine_tp_size
    shared = [list(range(i * engine_tp_size, (i + 1) * engine_tp_size)) for i in range(num_engines)]
    across = [list(range(i, world_size, engine_tp_size)) for i in range(engine_tp_size)]
    return shared, across


def _own_group(layout: list[list[int]], timeout: timedelta | None) -> ProcessGroup | None:
    if len(layout) == 1:
        return dist.group.WORLD
    rank = dist.get_rank()
    members = next(ranks for ranks in layout if rank in ranks)
    # Only members take part: with one group per rank, a collective over all ranks for every
    # group would make the start quadratic.
    group = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
    return cast("ProcessGroup", group)


def create_sub_group(
    engine_tp_size: int, *, timeout: timedelta | None = None
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Return this rank's groups: ranks that share its engine, and its peers in other engines.

    Returns:
        (engine_mp_group, engine_dp_group).

    Raises:
        ValueError: The number of ranks is not a multiple of `engine_tp_size`.
    """
    world_size = dist.get_world_size()
    check_divides(world_size, "engine_tp_size", engine_tp_size)
    shared, across = engine_group_ranks(world_size, engine_tp_size)
    return _own_group(shared, timeout), _own_group(across, timeout)


def separate_group(group: ProcessGroup | None, *, timeout: timedelta) -> ProcessGroup | None:
    """Return the same ranks (None is all) in another process group with separate collectives.

    Collective. For values on the CPU, so that no GPU memory goes into it. A group of one rank is
    returned as it is.
    """
    if dist.get_world_size(group) == 1:
        return group
    separate = dist.new_group(
        None if group is None else dist.get_process_group_ranks(group),
        timeout=timeout,
        backend="gloo",
        use_local_synchronization=group is not None,  # only members take part
    )
    return cast("ProcessGroup", separate)


def resolve_shard_size(shard_size: int, world_size: int) -> int:
    """Return the number of ranks over which a model is sharded; -1 means all.

    A size above the number of ranks is clamped to it, so that `shard_size=8` works everywhere.

    Raises:
        ValueError: The number of ranks is not a multiple of the (clamped) size.
    """
    if shard_size == -1 or shard_size > world_size:
        return world_size
    check_divides(world_size, "shard_size", shard_size)
    return shard_size


def accumulation_steps(
    *, train_batch_size: int, micro_train_batch_size: int, num_data_ranks: int, world_size: int
) -> int:
    """Return the micro-batches of one optimizer step on each rank.

    Raises:
        ValueError: `train_batch_size` is not a positive multiple of
            `micro_train_batch_size * num_data_ranks`; the message has the nearest legal values.
    """
    unit = micro_train_batch_size * num_data_ranks
    if train_batch_size < unit or train_batch_size % unit != 0:
        below = train_batch_size // unit * unit
        nearest = [n for n in (below, below + unit) if n > 0]
        split = "" if num_data_ranks == world_size else f" ({num_data_ranks} data-parallel)"
        raise ValueError(
            "train_batch_size must be divisible by (micro_train_batch_size * world_size)\n"
            f"  train_batch_size: {train_batch_size}\n"
            f"  micro_train_batch_size: {micro_train_batch_size}\n"
            f"  world_size: {world_size}{split}\n"
            f"  Required: {train_batch_size} % ({micro_train_batch_size} * {num_data_ranks}) == 0\n"
            f"  Nearest legal train_batch_size: {' or '.join(map(str, nearest))}"
        )
    return train_batch_size // unit

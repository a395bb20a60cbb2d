"""What the ranks agree on before any of them starts its engine."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightrft.engines.types import EngineConfig
from lightrft.strategy.distributed.process_groups import engine_group_ranks

# Engines that refuse to start where their share of the device's memory is not free.
NEED_SHARE = ("vllm",)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, and what is left there.

    Args:
        node: The same for all processes of one running system.
        free_bytes, total_bytes: Memory of the rank's GPU; 0 without one.
    """

    node: str
    free_bytes: int = 0
    total_bytes: int = 0


def own_place(*, has_gpu: bool) -> Place:
    """Of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    node = f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}".strip()
    free, total = torch.cuda.mem_get_info() if has_gpu else (0, 0)
    return Place(node, free, total)


def check_places(places: Sequence[Place], config: EngineConfig) -> None:
    """Refuses, on all ranks alike, an engine that could not start on one of them or would crawl.

    Args:
        places: Of every rank, by rank.
        config: Of the engine.

    Raises:
        ValueError: The ranks of an engine are on several nodes, or a GPU has too little memory
            left for vLLM's share; the message lists every such rank.
    """
    engines, _ = engine_group_ranks(len(places), config.tensor_parallel_size)
    for ranks in engines:
        nodes = sorted({places[rank].node.split(" ")[0] for rank in ranks})
        if len({places[rank].node for rank in ranks}) > 1:
            per_node = min(
                sum(place.node == places[rank].node for place in places) for rank in ranks
            )
            raise ValueError(
                f"engine_tp_size {config.tensor_parallel_size} puts ranks {ranks} of one engine on "
                f"several nodes ({', '.join(nodes)}), where each layer waits for the network: "
                f"expected a divisor of the {per_node} processes of a node"
            )
    share = config.memory_utilization
    short = [
        f"rank {rank} has {place.free_bytes / 1e9:.1f} of {place.total_bytes / 1e9:.1f} GB"
        for rank, place in enumerate(places)
        if config.engine_type in NEED_SHARE and place.free_bytes < share * place.total_bytes
    ]
    if short:
        raise ValueError(
            f"engine_mem_util {share:g} of a GPU must be free when the {config.engine_type} engine "
            f"starts: {'; '.join(short)} left; lower engine_mem_util, divide the model over more "
            "ranks (--fsdp, or --zero_stage 3), or end what else uses the GPU"
        )

"""Models that were built without memory: sharded first, then filled."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightrft.strategy.fsdp2.sharding import ShardingPlan, apply_units, move_buffers
from lightrft.strategy.weight_sync.parameter_source import tied_parameter_names


def meta_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters on the meta device, tied ones under their first name."""
    tied = tied_parameter_names(module)
    return {name for name, p in module.named_parameters() if p.is_meta and name not in tied}


def is_empty_everywhere(on_meta: set[str]) -> bool:
    """Whether rank 0, too, has parameters on the meta device. Collective."""
    # int, not bool: gloo has no broadcast of bool.
    flag = torch.tensor(int(bool(on_meta)))
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def pretrained_directory(module: nn.Module) -> Path:
    """Where the transformers model inside was told to come from.

    Raises:
        ValueError: There is none, or its configuration names no directory.
    """
    from transformers import PreTrainedModel

    for child in module.modules():
        if isinstance(child, PreTrainedModel):
            path = Path(str(child.config.name_or_path or "-"))
            if path.is_dir():
                return path
            raise ValueError(
                f"a model built with meta_init is filled from its directory: got {str(path)!r}, "
                "which is none; build it by from_pretrained of a local directory, or give rank 0 "
                "real weights"
            )
    raise ValueError(
        "a model built with meta_init is filled from the directory of a transformers model: there "
        "is none inside; build it without meta_init"
    )


def shard_empty_module(module: nn.Module, plan: ShardingPlan) -> None:
    """Shard a model in place; each rank then gives memory to its shards, whose values are unset."""
    apply_units(module, plan)
    storage = torch.device("cpu") if plan.offloads_to_cpu else plan.device

    def materialise(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=storage) if tensor.is_meta else tensor

    module._apply(materialise)  # type: ignore[no-untyped-call]
    move_buffers(module, plan.device)

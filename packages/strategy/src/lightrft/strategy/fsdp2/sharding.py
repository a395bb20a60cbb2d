"""Dividing a model into FSDP2 units and its parameters over ranks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    SourceParameter,
    checkpoint_module,
    chunk_ranges,
    local_rows,
    reshard_modules,
    shard_dims,
    sharded_source,
    tied_parameter_names,
    whole_parameter,
)

# Children under these names hold a vision tower (Qwen-VL, LLaVA, Gemma 3, InternVL ...).
VISION_NAMES = ("visual", "vision_tower", "vision_model", "vision_encoder")


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """Layout by which one model is sharded.

    Args:
        mesh: 1-D (shard) or 2-D (replicate, shard).
        device: Device of the buffers.
        param_dtype: Dtype in which shards are stored; frozen ones have the compute dtype, which is
            all that passes see of them.
        compute_dtype: Dtype of gathered parameters in forward and backward.
        reshard_after_forward: Free gathered parameters after the forward pass.
        offloads_to_cpu: Keep shards, gradients and optimizer states on the CPU.
        keeps_vision_whole: Keep the vision tower in the root unit, so that ranks without images
            reach the same collectives as ranks with some.
        compile_backend: Backend of torch.compile for every block; None does not compile.
    """

    mesh: DeviceMesh
    device: torch.device
    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    reshard_after_forward: bool = True
    offloads_to_cpu: bool = False
    keeps_vision_whole: bool = False
    compile_backend: str | None = None

    def mixed_precision(self) -> MixedPrecisionPolicy:
        """Gradients are reduced in float32 whatever the compute dtype."""
        if self.compute_dtype == torch.float32:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)

    def offload(self) -> OffloadPolicy:
        """Place of shards between uses."""
        if not self.offloads_to_cpu:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")


def find_blocks(module: nn.Module, *, keeps_vision_whole: bool = False) -> list[nn.Module]:
    """Return the outermost modules that become separate FSDP2 units, in forward order.

    Blocks are the instances of the classes that the transformers models inside name in
    `_no_split_modules`; without such names, the elements of lists of two or more modules of one
    class. Modules that share a parameter with the rest stay in the root unit; `find_ends` has the
    embeddings.

    Args:
        module: The whole model.
        keeps_vision_whole: Leave vision towers to the root unit.
    """
    names = _unsplittable_names(module)
    excluded = _vision_modules(module) if keeps_vision_whole else set()
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set(excluded)
    for candidate in module.modules():
        if candidate in inside or candidate is module or isinstance(candidate, nn.Embedding):
            continue
        blocks_here = [candidate] if type(candidate).__name__ in names else []
        if not names and isinstance(candidate, nn.ModuleList) and _is_repeated(candidate):
            blocks_here = list(candidate)
        for block in blocks_here:
            inside.update(block.modules())
            blocks.append(block)
    return [block for block in blocks if _owns_its_parameters(block, module)]


def find_ends(module: nn.Module) -> list[nn.Module]:
    """Return embedding and output projection of a text model, if each has a separate matrix.

    As separate units they are gathered and reduced one after the other, beside other work. A tied
    matrix stays in the root unit; so do both matrices of models with vision towers, and an
    embedding inside a block.
    """
    from transformers import PreTrainedModel

    model = next((child for child in module.modules() if isinstance(child, PreTrainedModel)), None)
    if model is None or _vision_modules(module):
        return []
    inside = {inner for block in find_blocks(module) for inner in block.modules()}
    ends = {model.get_input_embeddings(), model.get_output_embeddings()} - {None, *inside}
    return [end for end in module.modules() if end in ends and _owns_its_parameters(end, module)]


def _unsplittable_names(module: nn.Module) -> set[str]:
    from transformers import PreTrainedModel

    names: set[str] = set()
    for child in module.modules():
        if isinstance(child, PreTrainedModel):
            names.update(child._no_split_modules or ())
    return names


def _vision_modules(module: nn.Module) -> set[nn.Module]:
    return {
        inner
        for name, child in module.named_modules()
        if name.rsplit(".", 1)[-1] in VISION_NAMES
        for inner in child.modules()
    }


def _is_repeated(modules: nn.ModuleList) -> bool:
    has_parameters = all(next(child.parameters(), None) is not None for child in modules)
    return len(modules) >= 2 and len({type(child) for child in modules}) == 1 and has_parameters


def _owns_its_parameters(block: nn.Module, module: nn.Module) -> bool:
    inside = set(block.modules())
    parameters = {id(parameter) for parameter in block.parameters()}
    outside = {
        id(parameter)
        for child in module.modules()
        if child not in inside
        for parameter in child.parameters(recurse=False)
    }
    return bool(parameters) and not parameters & outside


def shard_module(module: nn.Module, plan: ShardingPlan) -> nn.Module:
    """Shard a model in place: every block and end is a unit, all else the root unit.

    Parameters on the meta device on some rank are filled with those of rank 0, which must have
    real ones: see `shard_empty_module` for the other case.
    """
    full = _full_values_of_rank_0(module)
    if full is None:
        apply_units(module, plan)
        move_buffers(module, plan.device)
    else:
        shard_empty_module(module, plan)
        _fill_from_rank_0(module, full)
    return module


def apply_units(module: nn.Module, plan: ShardingPlan) -> None:
    """Make the units of a model; parameters on the meta device stay there."""
    cast_parameters(module, plan)
    options = {
        "mesh": plan.mesh,
        "reshard_after_forward": plan.reshard_after_forward,
        "mp_policy": plan.mixed_precision(),
        "offload_policy": plan.offload(),
    }
    for block in find_blocks(module, keeps_vision_whole=plan.keeps_vision_whole):
        if plan.compile_backend is not None:
            # Inside the unit: its hooks, which gather and free parameters, are not compiled.
            block.compile(backend=plan.compile_backend)
        fully_shard(block, **options)  # type: ignore[call-overload]
    for end in find_ends(module):
        fully_shard(end, **options)  # type: ignore[call-overload]
    # The root is resharded too: its parameters are then shards whenever no forward pass runs.
    fully_shard(module, **options)  # type: ignore[call-overload]
    module.register_forward_hook(_forget_pass)


def _forget_pass(module: nn.Module, *_: object) -> None:
    """Drop FSDP2's list of the units that ran, if no backward pass will follow.

    The next backward pass uses and clears the list. A reference or reward model has no backward
    pass, so its list would grow with every forward.
    """
    if torch.is_grad_enabled():
        return
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            state = unit._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            if state._fsdp_param_group is not None:
                state._fsdp_param_group._post_forward_indices.clear()


def cast_parameters(module: nn.Module, plan: ShardingPlan) -> None:
    """Store parameters as a plan says; buffers, such as rotary frequencies, keep their dtype."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            dtype = plan.param_dtype if parameter.requires_grad else plan.compute_dtype
            parameter.data = parameter.data.to(dtype)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers, which are whole on every rank."""
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def _full_values_of_rank_0(module: nn.Module) -> dict[str, Tensor] | None:
    """Return None if every rank has real values; else rank 0's by name, and {} elsewhere."""
    # int, not bool: MAX is the logical or.
    flag = torch.tensor(int(any(parameter.is_meta for parameter in module.parameters())))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if not flag.item():
        return None
    if dist.get_rank() > 0:
        return {}
    return {name: value.detach() for name, value in _named_values(module)}


def _named_values(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    # Buffers that are not saved (rotary frequencies) are included: they must be filled, too.
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def _fill_from_rank_0(module: nn.Module, full: Mapping[str, Tensor]) -> None:
    for name, target in list(_named_values(module)):
        device = target.device_mesh.device_type if isinstance(target, DTensor) else target.device
        if dist.get_rank() == 0:
            value = full[name].to(device, target.dtype).contiguous()
        else:
            value = torch.empty(target.shape, dtype=target.dtype, device=device)
        dist.broadcast(value, src=0)
        local, start, stop = local_rows(target.detach())
        local.copy_(value[start:stop] if target.dim() else value)


def accumulate_in_float32(module: nn.Module) -> None:
    """Let the low-precision shards of a sharded model accumulate their gradients in float32.

    FSDP2 reduces in float32, then rounds to the shard's dtype and adds to `grad` there: in
    bfloat16, 256 gradients of 2^-8 after one of 1 are lost. Where `grad` is float32, it adds to
    that.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.grad_dtype = None  # FSDP2 assigns a low-precision one first
            parameter.register_post_accumulate_grad_hook(_widen_gradient)


def _widen_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad.float()


def gradient_norm(parameters: Iterable[Tensor], device: torch.device) -> float:
    """Return the global 2-norm of sharded gradients, equal on every rank. Collective.

    Each replica of a hybrid mesh contributes its share, so one sum over all ranks is enough.

    Args:
        parameters: Parameters of one optimizer.
        device: Device of the sum; the same kind on every rank, also on one whose shards are empty
            or offloaded.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        num_replicas = 1
        if isinstance(gradient, DTensor):
            sizes = gradient.device_mesh.shape
            for size, place in zip(sizes, gradient.placements, strict=True):
                num_replicas *= size if place.is_replicate() else 1
            gradient = gradient.to_local()
        else:
            num_replicas = dist.get_world_size()
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        total += square.to(device) / num_replicas
    dist.all_reduce(total)
    return float(total.sqrt().item())


def as_fsdp(module: nn.Module) -> FSDPModule:
    """Return the module as an FSDP2 root.

    Raises:
        ValueError: It has not been sharded.
    """
    if not isinstance(module, FSDPModule):
        raise ValueError(
            f"{type(module).__name__} is not sharded: call strategy.prepare_model(model, "
            "is_training=True), or prepare_models_and_optimizers, first"
        )
    return module


def meta_parameters(module: nn.Module) -> set[str]:
    """Return names of the parameters on the meta device, tied ones under their first name."""
    tied = tied_parameter_names(module)
    return {name for name, p in module.named_parameters() if p.is_meta and name not in tied}


def is_empty_everywhere(on_meta: set[str]) -> bool:
    """Return whether rank 0, too, has parameters on the meta device. Collective."""
    # int, not bool: gloo has no broadcast of bool.
    flag = torch.tensor(int(bool(on_meta)))
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def pretrained_directory(module: nn.Module) -> Path:
    """Return the directory in the configuration of the transformers model inside.

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
    """Shard a model in place; then each rank allocates its shards, whose values are unset."""
    apply_units(module, plan)
    storage = torch.device("cpu") if plan.offloads_to_cpu else plan.device
    module._apply(
        lambda tensor: torch.empty_like(tensor, device=storage) if tensor.is_meta else tensor
    )
    move_buffers(module, plan.device)


def fsdp2_parameter_source(module: nn.Module) -> ParameterSource:
    """Return the source of a model wrapped by `fully_shard`, on a flat or hybrid mesh.

    Side effect: units that are unsharded between forwards are resharded, because their registered
    parameters are temporary copies until then.

    Args:
        module: Wrapped actor or bare model.

    Raises:
        ValueError: A parameter is sharded along another dimension than its first, or over more
            than one mesh dimension, or two parameters are sharded over different ranks.
    """
    reshard_modules(module)
    root = checkpoint_module(module)
    entries = [_entry(name, parameter) for name, parameter in root.named_parameters()]
    return sharded_source(module, root, entries)


def _entry(name: str, parameter: Tensor) -> tuple[SourceParameter, ProcessGroup | None]:
    if not isinstance(parameter, DTensor):
        return whole_parameter(name, parameter), None
    try:
        (dim,) = shard_dims(parameter)
    except ValueError as err:
        raise ValueError(
            "a parameter must be sharded once, along its first dimension: got "
            f"{parameter.placements} for {name!r}; leave shard_placement_fn unset"
        ) from err
    group = parameter.device_mesh.get_group(dim)
    local = cast("DTensor", parameter.detach()).to_local()
    shards = chunk_ranges(tuple(parameter.shape), dist.get_world_size(group))
    start, stop = shards[dist.get_rank(group)]
    if local.numel() != stop - start or not local.is_contiguous():
        raise ValueError(
            f"the shard of {name!r} must be the contiguous range [{start}, {stop}) of shape "
            f"{tuple(parameter.shape)}: got a shard of shape {tuple(local.shape)}"
        )
    entry = SourceParameter(
        checkpoint_name=name,
        shape=tuple(parameter.shape),
        shards=shards,
        local_shard=local.view(-1),
        frozen=not parameter.requires_grad,
        is_aliasable=len(shards) == 1,
    )
    return entry, group

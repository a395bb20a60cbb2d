"""The trainer's parameters for a weight sync: names, shards and values of one rank."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard as ShardPlacement

from lightrft.config import EngineOptions
from lightrft.config.parts.machine import MERGED, sends_adapters
from lightrft.engines.types import AdapterShape, Vocabulary, tied_names

FlatRange = tuple[int, int]
# `add_local(name, start, values)` adds in place to float32 `values`, the elements from `start`.
AddLocal = Callable[[str, int, Tensor], None]


@dataclass(frozen=True, slots=True)
class SourceParameter:
    """One parameter of the trainer, as far as this rank holds it.

    Args:
        checkpoint_name: Name in a Hugging Face checkpoint.
        shape: Full, unsharded shape.
        shards: `shards[r] = (start, stop)` is the flat range of the full tensor on rank r of the
            source's group; the single entry `(0, numel)` means that every rank holds all of it.
        local_shard: 1-D tensor with this rank's range. It shares the trainer's storage.
        frozen: Whether training never changes it.
        is_aliasable: Whether the shard is whole and is the storage that training updates, so that
            an engine can share it for good.

    Raises:
        ValueError: The shard is not flat, or too large or small for every one of the ranges.
    """

    checkpoint_name: str
    shape: tuple[int, ...]
    shards: tuple[FlatRange, ...]
    local_shard: Tensor
    frozen: bool
    is_aliasable: bool = False

    def __post_init__(self) -> None:
        sizes = {stop - start for start, stop in self.shards}
        if self.local_shard.dim() != 1 or self.local_shard.numel() not in sizes:
            raise ValueError(
                f"the local shard of {self.checkpoint_name!r} must be 1-D with one of the sizes "
                f"{sorted(sizes)}: got shape {tuple(self.local_shard.shape)}"
            )

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def is_sharded(self) -> bool:
        """Return whether ranks hold different ranges."""
        return len(self.shards) > 1

    def range_on(self, rank: int) -> FlatRange:
        """Return the range of a rank of the source's group."""
        return self.shards[rank if self.is_sharded else 0]


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """Source with a fixed list of parameters.

    Args:
        owner: Module with these parameters.
        entries: Result of `parameters`.
        group: Ranks that hold the shards; None if nothing is sharded.
        tied_names: Second names of tied parameters -> the name in `entries`.
        add_local: Function that adds adapters to a range of one parameter, or None.
        changed_base: Frozen parameters in whose place entries with adapters stand.
    """

    owner: nn.Module
    entries: tuple[SourceParameter, ...]
    group: ProcessGroup | None = None
    tied_names: Mapping[str, str] = field(default_factory=dict)
    add_local: AddLocal | None = None
    changed_base: tuple[SourceParameter, ...] = ()

    def parameters(self) -> Sequence[SourceParameter]:
        """Return the entries."""
        return self.entries


def reshard_modules(module: nn.Module) -> None:
    """Free every unit's gathered parameters; the shards take their place."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


@torch.no_grad()
def use_storage(
    module: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> None:
    """Let parameters whose local tensors are `before` read the tensors of these names in `after`.

    Args:
        module: Model; FSDP2's units are sharded.
        before, after: Equal values in two places.
    """
    moved = {tensor.data_ptr(): after[name] for name, tensor in before.items()}
    for parameter in module.parameters():
        # `to_local` returns a view of it.
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        local.data = moved.get(local.data_ptr(), local.data)
    for unit in module.modules():
        group = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
        for each in () if group is None else group.fsdp_params:
            each.reset_sharded_param()


def sharded_source(
    module: nn.Module,
    root: nn.Module,
    entries: Sequence[tuple[SourceParameter, ProcessGroup | None]],
) -> ParameterSource:
    """Return the source of parameters that are sharded over one group of ranks, or whole.

    Args:
        module: Wrapped actor or bare model.
        root: Its `checkpoint_module`.
        entries: Parameters of `root`, each with the group that holds its shards.

    Raises:
        ValueError: Two parameters are sharded over different ranks.
    """
    group: ProcessGroup | None = None
    for entry, shard_group in entries:
        if not entry.is_sharded:
            continue
        # By their ranks: a mesh may return its group as another object each time.
        ranks = torch.distributed.get_process_group_ranks(shard_group)
        group = group or shard_group
        known = torch.distributed.get_process_group_ranks(group)
        if ranks != known:
            raise ValueError(
                "all parameters must be sharded over the same ranks: got "
                f"{entry.checkpoint_name!r} on {ranks} and others on {known}"
            )
    parameters = tuple(entry for entry, _ in entries)
    return ParameterSource(module, parameters, group, tied_parameter_names(root))


def checkpoint_module(module: nn.Module) -> nn.Module:
    """Return the part of a model whose parameter names are those of its checkpoint.

    An actor or critic wraps a transformers model as its child `model`; a bare transformers model,
    even with a child of that name, is the checkpoint module itself.
    """
    from transformers import PreTrainedModel

    is_bare: bool = isinstance(module, PreTrainedModel)
    if is_bare:
        return module
    child = dict(module.named_children()).get("model")
    return module if child is None else child


def tied_parameter_names(module: nn.Module) -> dict[str, str]:
    """Return second names of parameters that occur more than once -> their first name."""
    return tied_names(module.named_parameters(remove_duplicate=False))


def module_parameter_source(module: nn.Module) -> ParameterSource:
    """Return the source of a model whose parameters are whole on every rank.

    Args:
        module: Actor (its child `model` is read) or bare model.
    """
    root = checkpoint_module(module)
    entries = tuple(whole_parameter(name, value) for name, value in root.named_parameters())
    return ParameterSource(module, entries, tied_names=tied_parameter_names(root))


def whole_parameter(name: str, parameter: Tensor) -> SourceParameter:
    """Return a source entry for a parameter that every rank holds whole."""
    values = parameter.detach()
    return SourceParameter(
        checkpoint_name=name,
        shape=tuple(parameter.shape),
        shards=((0, values.numel()),),
        # A copy if the values are strided.
        local_shard=values.reshape(-1),
        frozen=not parameter.requires_grad,
        is_aliasable=values.is_contiguous(),
    )


def local_rank_in(group: ProcessGroup | None) -> int:
    """Return the index of this rank in the gather group; 0 without one."""
    return 0 if group is None else torch.distributed.get_rank(group)


def chunk_ranges(shape: tuple[int, ...], num_ranks: int) -> tuple[FlatRange, ...]:
    """Return each rank's flat range as `torch.chunk` divides the first dimension.

    Every rank but the last non-empty one holds ceil(rows / num_ranks) rows; some may hold none.
    """
    num_rows = shape[0]
    row_size = math.prod(shape[1:])
    rows_per_rank = -(-num_rows // num_ranks)
    bounds = [min(rank * rows_per_rank, num_rows) * row_size for rank in range(num_ranks + 1)]
    return tuple(itertools.pairwise(bounds))


def shard_dims(tensor: DTensor) -> list[int]:
    """Return the one dimension of the mesh over which a tensor is sharded, if it is.

    Raises:
        ValueError: It is sharded over several, or along another dimension than its first.
    """
    dims = [d for d, place in enumerate(tensor.placements) if not place.is_replicate()]
    if len(dims) > 1 or any(tensor.placements[d] != ShardPlacement(0) for d in dims):
        raise ValueError(
            "expected a tensor sharded once, along its first dimension: got "
            f"{tensor.placements}; leave shard_placement_fn unset"
        )
    return dims


def local_rows(tensor: Tensor) -> tuple[Tensor, int, int]:
    """Return this rank's part of a tensor, and the rows of the whole that it covers.

    Returns:
        (local tensor, first row, row after the last); a tensor that is not sharded is its local
        part, and a scalar has rows 0 to 0.

    Raises:
        ValueError: It is sharded along another dimension than its first.
    """
    if not isinstance(tensor, DTensor):
        return tensor, 0, (tensor.shape[0] if tensor.dim() else 0)
    dims, local = shard_dims(tensor), tensor.to_local()
    if not dims:
        return local, 0, tensor.shape[0]
    rows = chunk_ranges((tensor.shape[0],), tensor.device_mesh.size(dims[0]))
    return local, *rows[tensor.device_mesh.get_local_rank(dims[0])]


@runtime_checkable
class AdaptedModel(Protocol):
    """A wrapper whose weights are a stored base plus trained adapters."""

    def base_source(self, source: ParameterSource) -> ParameterSource:
        """Return the parameters without adapters, under the base model's names."""

    def merged_source(self, source: ParameterSource) -> ParameterSource:
        """Return the parameters under the base model's names, with adapters in `add_local`.

        Collective over the source's group.
        """

    def adapter_source(self, source: ParameterSource) -> ParameterSource:
        """Return the base by its names, A and s B by those of `lightrft.engines.adapters`."""

    def adapter_shape(self) -> AdapterShape:
        """Return the rank of the adapters and the layers that have one."""

    def adapters_off(self) -> AbstractContextManager[None]:
        """Return a context with the base model, where nothing may need a gradient."""

    def merged_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return full values, adapters added to the weights, by the base model's names."""

    def save_adapters(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write the adapters alone, in the format of their library, from full values."""


@runtime_checkable
class KnowsVocabulary(Protocol):
    """A model that knows which ids are tokens, and at which of them a completion ends."""

    vocabulary: Vocabulary


def vocabulary_of(model: object) -> Vocabulary | None:
    """Return the vocabulary of a model that knows it; None of any other."""
    return model.vocabulary if isinstance(model, KnowsVocabulary) else None


def base_source(module: nn.Module, source: ParameterSource) -> ParameterSource:
    """Return the source of a model's weights without adapters, under its checkpoint's names."""
    return module.base_source(source) if isinstance(module, AdaptedModel) else source


def engine_source(
    module: nn.Module, source: ParameterSource, *, has_adapters: bool = False
) -> ParameterSource:
    """Return the source for a rollout engine: adapters are part of the weights they change.

    Args:
        module: Wrapper or bare model.
        source: Parameters of the module.
        has_adapters: Whether the engine has places for the adapters themselves.
    """
    if not isinstance(module, AdaptedModel):
        return source
    return module.adapter_source(source) if has_adapters else module.merged_source(source)


@contextmanager
def lent_base(
    actor: nn.Module | None,
    read: Callable[[], ParameterSource] | None,
    lend: Callable[[Mapping[str, Tensor], torch.device], Mapping[str, Tensor]],
) -> Iterator[Callable[[], None]]:
    """Keep frozen weights on the host while an engine starts in the body, then use the engine's.

    Those that it does not lend return to their device.

    Args:
        actor: Model with adapters; None changes nothing.
        read: Function that returns its parameters.
        lend: `RolloutEngine.lend_weights` of the engine that has started.

    Yields:
        Function that ends the use of the engine's, which must be called before it closes.
    """
    if actor is None or read is None:
        yield lambda: None
        return
    owner, device, parked = _park(engine_source(actor, read(), has_adapters=True))
    lent: dict[str, Tensor] = {}

    def end() -> None:
        use_storage(owner, lent, {name: _copied(tensor) for name, tensor in lent.items()})
        lent.clear()

    def unpark() -> None:
        kept = {name: tensor.to(device) for name, tensor in parked.items() if name not in lent}
        use_storage(owner, parked, {**kept, **lent})

    try:
        yield end
    except BaseException:
        # An engine that is half built may hold the room; its error is the one to show.
        with suppress(torch.OutOfMemoryError):
            unpark()
        raise
    lent.update(lend(parked, device))
    unpark()


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy on the device, or on the host if the device has no room."""
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return tensor.cpu()


def _park(source: ParameterSource) -> tuple[nn.Module, torch.device, dict[str, Tensor]]:
    """Move whole frozen weights to the host; return the module, their device and them by name."""
    # In a function of its own, or these views would keep the memory of the device.
    frozen = [entry for entry in source.entries if entry.frozen and entry.is_aliasable]
    base = {entry.checkpoint_name: entry.local_shard.view(entry.shape) for entry in frozen}
    parked = {name: tensor.cpu() for name, tensor in base.items()}
    use_storage(source.owner, base, parked)
    device = next((tensor.device for tensor in base.values()), torch.device("cpu"))
    return source.owner, device, parked


def adapters_of(
    module: nn.Module | None, config: EngineOptions, engine: str
) -> AdapterShape | None:
    """Return the adapters that an engine holds beside its weights; None with merged weights.

    Args:
        module: Actor, or None.
        config: Options; `lora_sync` chooses.
        engine: Name of the engine.

    Raises:
        ValueError: They are to travel alone, and the actor has none or is missing.
    """
    shape: AdapterShape | None = None
    if module is not None and isinstance(module, AdaptedModel):
        shape = module.adapter_shape()
    are_packed = shape is not None and bool(shape.packed)
    if not sends_adapters(config.lora_sync, engine, are_packed=are_packed):
        return None
    if shape is not None:
        return shape
    got = "no actor" if module is None else type(module).__name__
    raise ValueError(
        f"lora_sync adapter needs an actor with adapters when the engine starts: got {got}; give "
        f"actor= with lora_rank, or lora_sync {MERGED}"
    )


def gathered_dtype(module: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are gathered for a file: adapters are added first."""
    return torch.float32 if isinstance(module, AdaptedModel) else dtype


def exported_state(
    module: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """Return the values of a file: adapters merged and rounded once.

    Args:
        module: Wrapper or bare model.
        state: Full CPU values by name in `module`, in `gathered_dtype`.
        dtype: Type of the floating point values in the file.
    """
    if not isinstance(module, AdaptedModel):
        return state
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in module.merged_state(state).items()
    }

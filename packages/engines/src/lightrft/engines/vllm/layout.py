"""Places of checkpoint parameters inside vLLM's fused, padded and sharded tensors."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from lightrft.engines.model_shape import ModelShape
from lightrft.engines.types import EngineParameter
from lightrft.engines.vllm.adapters import LayerRows, plain_modules
from lightrft.engines.vllm.experts import PLAIN_BACKENDS, ExpertSlot, backend_name, expert_slot
from lightrft.engines.vllm.loading import TracedLoading, trace_loading

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Place:
    """Rows of a vLLM tensor that hold rows of one checkpoint parameter.

    Args:
        module_name: Name of the vLLM module.
        attribute: Name of the tensor in it.
        local_start, num_rows: Range of rows of the local tensor.
        global_start: First row of the range in the full parameter.
        is_replicated: Whether every rank of the tensor-parallel group holds the same rows.
        num_row_dims: Leading dimensions of the tensor that count rows: 2 in a stack of experts.
    """

    module_name: str
    attribute: str
    local_start: int
    num_rows: int
    global_start: int
    is_replicated: bool
    num_row_dims: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Parameters of the engine, with places of those that can be read back.

    Args:
        manifest: All parameters.
        places: Places by checkpoint name; several if a rank has separate rows of one parameter.
        modules: vLLM module of each loaded parameter by checkpoint name, without tied and unused
            parameters.
        saved_names: Parameters that vLLM loads only by the names of files on disk.
        direct_modules: Modules into which vLLM's model copies past the loaders of their tensors.
        model: Model of transformers, whose rules give these names.
    """

    manifest: tuple[EngineParameter, ...]
    places: Mapping[str, tuple[Place, ...]]
    modules: Mapping[str, str]
    saved_names: frozenset[str] = frozenset()
    direct_modules: frozenset[str] = frozenset()
    model: PreTrainedModel | None = None


def check_buffers(model: nn.Module) -> None:
    """Refuse a model that was started without its checkpoint and holds more than weights.

    Raises:
        ValueError: The model has a saved buffer of floats, which no update writes.
    """
    for name, module in model.named_modules():
        for buffer_name, buffer in module.named_buffers(recurse=False):
            is_saved = buffer_name not in module._non_persistent_buffers_set
            # Scales of the cache are set to 1 once weights are loaded.
            if is_saved and buffer.is_floating_point() and not buffer_name.endswith("_scale"):
                raise ValueError(
                    f"vLLM's model has a buffer {name}.{buffer_name}, which is in its checkpoint "
                    "and in no weight update: expected weights alone; let vLLM read the "
                    "checkpoint, --engine_args load_format=auto"
                )


class LayoutReader:
    """Reader of the places of checkpoint parameters in a vLLM model.

    Args:
        model: vLLM's model, right after loading.
        shape: Names and shapes of the checkpoint's parameters.
        tp_rank, tp_size: Position of this rank in its tensor-parallel group.
        default_dtype: dtype of parameters that vLLM stores in a quantised form.
        may_lack: Prefix of parameters that vLLM may leave out because the model does not use
            them; none if empty.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: ModelShape,
        *,
        tp_rank: int,
        tp_size: int,
        default_dtype: torch.dtype,
        may_lack: str = "",
    ) -> None:
        self._model = model
        self._modules = plain_modules(model)
        self._shape = shape
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._default_dtype = default_dtype
        self._may_lack = may_lack
        self._packed = _packed_modules(model)
        self._map_name = _name_map(model)

    def read(self) -> Layout:
        """Return the layout of every parameter.

        Raises:
            ValueError: vLLM's model has no tensor for a parameter, or a module into which no
                parameter is loaded.
        """
        names = [name for name in self._shape.shapes if name not in self._shape.tied]
        traced = self._traced(names)
        existing = self._existing(names, traced)
        groups: dict[str, list[str]] = {}
        for name, (module_name, _) in existing.items():
            groups.setdefault(module_name, []).append(name)
        placed = {
            name: self._places(name, target, groups[target[0]], traced)
            for name, target in existing.items()
        }
        places = {name: rows for name, rows in placed.items() if rows}
        modules = {name: target[0] for name, target in existing.items()}
        manifest = []
        for name, full_shape in self._shape.shapes.items():
            owner = self._shape.tied.get(name, name)
            # vLLM processes a module once all of its tensors are loaded, including the bias.
            members = groups[modules[name]] if name in existing else ()
            manifest.append(
                EngineParameter(
                    name,
                    full_shape,
                    self._dtype(existing.get(owner)),
                    verifiable=owner in places,
                    tied_to=self._shape.tied.get(name),
                    fused_with=tuple(other for other in members if other != name),
                )
            )
        return Layout(
            tuple(manifest),
            places,
            modules,
            traced.saved_names,
            traced.direct_modules,
            self._shape.model,
        )

    def _existing(self, names: Sequence[str], traced: TracedLoading) -> dict[str, tuple[str, str]]:
        """Return the tensor of each parameter; raise a ValueError as `read` does."""
        targets = {name: self.target_of(name) for name in names}
        existing = {name: traced.targets(name)[0] for name in traced.fills}
        existing |= {name: target for name, target in targets.items() if target is not None}
        optional = (self._may_lack,) if self._may_lack else ()
        missing = [n for n in names if n not in existing and not n.startswith(optional)]
        if missing:
            raise ValueError(
                f"vLLM's model has no tensor for {len(missing)} checkpoint parameters (first: "
                f"{missing[0]}); this architecture needs engine_type='hf'"
            )
        self._check_filled(existing.values(), traced.loadable)
        return existing

    def _places(
        self,
        name: str,
        target: tuple[str, str],
        members: Sequence[str],
        traced: TracedLoading,
    ) -> tuple[Place, ...]:
        """Return the rows of a parameter; () if the weights in use are others or unreadable."""
        if traced.is_computed(name):
            return ()
        if self.target_of(name) is None:
            return self._exact_places(name, traced)
        return self._place(name, target, members)

    def _traced(self, names: Sequence[str]) -> TracedLoading:
        """Return what vLLM's loaders fill from parameters."""
        if not names or not callable(getattr(self._model, "load_weights", None)):
            return TracedLoading({}, frozenset(), frozenset())
        shapes = {name: self._shape.shapes[name] for name in names}
        return trace_loading(
            self._model, self._modules, shapes, self._default_dtype, self._shape.model
        )

    def _exact_places(self, name: str, traced: TracedLoading) -> tuple[Place, ...]:
        """Return the elements of a traced parameter; () if the weights in use differ."""
        places = []
        for fill in traced.exact_fills(name, math.prod(self._shape.shapes[name])):
            module, tensor = self._modules[fill.target[0]], self._tensor(fill.target)
            is_plain = backend_name(module) in {"", *PLAIN_BACKENDS}
            is_read = is_plain and not self._is_repacked(module, name) and self._tp_size == 1
            if not (is_read and tensor.dtype in _FLOATS and tensor.is_contiguous()):
                return ()
            place = (fill.local_start, fill.num_elements, fill.global_start or 0)
            places.append(Place(*fill.target, *place, True, num_row_dims=max(tensor.dim(), 1)))
        return tuple(places)

    def layer_rows(self, layers: Sequence[str]) -> dict[str, LayerRows]:
        """Return the rows of linear layers of the checkpoint in vLLM's modules."""
        traced = self._traced([f"{layer}.weight" for layer in layers])
        rows = {}
        for layer in layers:
            name = f"{layer}.weight"
            fills = traced.fills.get(name, ())
            if not fills:
                rows[layer] = LayerRows("", 0, 0)
                continue
            width = math.prod(self._shape.shapes[name][1:])
            start = min(fill.local_start for fill in fills) // width
            num_rows = sum(fill.num_elements for fill in fills) // width
            rows[layer] = LayerRows(fills[0].target[0], start, start + num_rows)
        return rows

    def _check_filled(
        self, targets: Iterable[tuple[str, str]], loadable: frozenset[tuple[str, str]]
    ) -> None:
        """Raise a ValueError unless an update writes every module.

        vLLM derives a module's other tensors, such as scales, from checkpoint tensors.
        """
        filled = {id(self._tensor(target)) for target in targets}
        empty = []
        for name, module in self._modules.items():
            parameters = {
                attribute: tensor
                for attribute, tensor in module.named_parameters(recurse=False)
                if not loadable or (name, attribute) in loadable
            }
            if parameters and not any(id(tensor) in filled for tensor in parameters.values()):
                empty.append(f"{name}.{next(iter(parameters))}")
        if empty:
            raise ValueError(
                f"no checkpoint parameter is loaded into {len(empty)} modules of vLLM's model "
                f"(first: {empty[0]}), which would keep old weights; this architecture needs "
                "engine_type='hf'"
            )

    def _dtype(self, target: tuple[str, str] | None) -> torch.dtype:
        dtype = None if target is None else self._tensor(target).dtype
        return dtype if dtype in _FLOATS else self._default_dtype

    def target_of(self, name: str) -> tuple[str, str] | None:
        """Return the module and attribute into which a checkpoint name is loaded."""
        mapped = self._map_name(name)
        if mapped is None:
            return None
        slot = expert_slot(mapped)
        if slot is not None and slot.module_name in self._modules:
            return slot.module_name, slot.attribute
        module_name, _, attribute = mapped.rpartition(".")
        if module_name not in self._modules:
            parent, _, last = module_name.rpartition(".")
            fused = next((f for f, parts in self._packed.items() if last in parts), None)
            module_name = f"{parent}.{fused}"
        module = self._modules.get(module_name)
        has_tensor = module is not None and module._parameters.get(attribute) is not None
        return (module_name, attribute) if has_tensor else None

    def _tensor(self, target: tuple[str, str]) -> torch.Tensor:
        tensor: torch.Tensor = self._modules[target[0]].get_parameter(target[1])
        return tensor

    def _place(
        self, name: str, target: tuple[str, str], members: Sequence[str]
    ) -> tuple[Place, ...]:
        """Return the rows of a parameter; () if the weights in use cannot be read there."""
        module, tensor = self._modules[target[0]], self._tensor(target)
        shape = self._shape.shapes[name]
        slot = expert_slot(self._map_name(name) or name)
        if slot is not None and target == (slot.module_name, slot.attribute):
            return self._expert_place(slot, module, tensor, shape)
        if tensor.dtype not in _FLOATS or tensor.dim() != len(shape) or not shape:
            return ()
        if tuple(tensor.shape[1:]) != shape[1:] or self._is_repacked(module, name):
            return ()
        rows = vocabulary_rows(module)
        if rows is not None:
            start, stop = min(rows[0], shape[0]), min(rows[1], shape[0])
            if stop - start > tensor.shape[0]:
                return ()
            return (Place(*target, 0, stop - start, start, is_replicated=self._tp_size == 1),)
        return self._linear_places(name, target, members)

    def _linear_places(
        self, name: str, target: tuple[str, str], members: Sequence[str]
    ) -> tuple[Place, ...]:
        """Return the rows of a parameter in a tensor that may be fused and split over ranks."""
        tensor, full_rows = self._tensor(target), self._shape.shapes[name][0]
        num_local = tensor.shape[0]
        parts = self._parts(name, target, members)
        sizes = [self._shape.shapes[part][0] for part in parts]
        index = parts.index(name)
        if sum(sizes) == num_local:
            return (Place(*target, sum(sizes[:index]), full_rows, 0, is_replicated=True),)
        module = self._modules[target[0]]
        if not _is_loaded_by(module, tensor):
            return ()
        wanted = range(index, index + 1)
        if len(parts) == 1 and "output_sizes" in vars(module):
            # One checkpoint tensor holds all parts of the module: each part is split.
            sizes = [int(size) for size in vars(module)["output_sizes"]]
            if sum(sizes) != full_rows:  # several ranks hold the same heads
                return ()
            wanted = range(len(sizes))
        is_split = all(size % self._tp_size == 0 for size in sizes)
        if not is_split or sum(sizes) != num_local * self._tp_size:
            return ()
        first = sum(sizes[:index]) if len(parts) > 1 else 0
        places = []
        for part in wanted:
            before, num_rows = sum(sizes[:part]), sizes[part] // self._tp_size
            start = before - first + self._tp_rank * num_rows
            places.append(
                Place(*target, before // self._tp_size, num_rows, start, is_replicated=False)
            )
        return tuple(places)

    def _expert_place(
        self, slot: ExpertSlot, module: nn.Module, tensor: torch.Tensor, shape: tuple[int, ...]
    ) -> tuple[Place, ...]:
        """Return the rows of an expert or a stack; shards of stacks are not read back."""
        if backend_name(module) not in PLAIN_BACKENDS or tensor.dtype not in _FLOATS:
            return ()
        num_experts, rows = tensor.shape[:2]
        num_rows = slot.num_rows(num_experts, rows)
        if num_rows * tensor.shape[2] != math.prod(shape) or tensor.shape[2] != shape[-1]:
            return ()
        first = slot.first_row(rows)
        target = slot.module_name, slot.attribute
        return (Place(*target, first, num_rows, 0, is_replicated=True, num_row_dims=2),)

    def _parts(self, name: str, target: tuple[str, str], members: Sequence[str]) -> list[str]:
        """Return the parameters in the same tensor, in their order there."""
        together = [member for member in members if self.target_of(member) == target]
        order = self._packed.get(target[0].rpartition(".")[2], [])
        place_of = {member: member.split(".")[-2] for member in together}
        if len(together) == 1 or not set(place_of.values()) <= set(order):
            # The order is unknown: the size of one will not fit, so it is not read back.
            return [name]
        return sorted(together, key=lambda member: order.index(place_of[member]))

    def _is_repacked(self, module: nn.Module, name: str) -> bool:
        """Return whether vLLM computes with a repacked copy of the stored weight."""
        function = vars(module).get("cpu_linear")
        if function is None or function is torch.nn.functional.linear or name.endswith(".bias"):
            return False
        # Embeddings are looked up in storage; only a tied head uses the copy.
        is_embedding_only = vocabulary_rows(module) is not None and not _is_head(module)
        return not (is_embedding_only and name not in self._shape.tied.values())


def _is_loaded_by(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Return whether a module's loader shards its tensor; others may distribute rows otherwise."""
    loader = getattr(tensor, "weight_loader", None)
    return loader is None or getattr(loader, "__self__", None) is module


def vocabulary_rows(module: nn.Module) -> tuple[int, int] | None:
    """Return first and last vocabulary row of this rank's shard of an embedding or head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if not isinstance(module, VocabParallelEmbedding):
        return None
    indices = module.shard_indices
    return int(indices.org_vocab_start_index), int(indices.org_vocab_end_index)


def _is_head(module: nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead)


def _packed_modules(model: nn.Module) -> Mapping[str, list[str]]:
    """Return the checkpoint's modules, in order, by vLLM's fused module.

    The model's mapping wins over that of its parts. Parts are needed because some vision-language
    models do not list what their language model fuses.
    """
    packed: dict[str, list[str]] = {}
    for part in model.modules():
        packed = {**getattr(part, "packed_modules_mapping", {}), **packed}
    return packed


def _name_map(model: nn.Module):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """Return vLLM's map of checkpoint names; the identity for models without one."""
    try:
        return model.hf_to_vllm_mapper.map_name  # type: ignore[union-attr]
    except AttributeError:
        return lambda name: name

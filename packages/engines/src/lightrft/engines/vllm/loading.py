"""Tensors that vLLM's loaders fill, traced by loading parameters without memory.

A model's `load_weights` runs on tensors of the device "meta", while vLLM's are replaced by those it
had before it processed them. Each copy into one of them is noted and not executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Target = tuple[str, str]
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements of a vLLM tensor that a loader fills.

    Args:
        target: Module and attribute of the tensor.
        local_start, num_elements: Range of elements of the local tensor.
        names: Checkpoint parameters from which the values come.
        global_start: First element in the only parameter; None if they are strided or computed.
        is_computed: Whether the values are made of the parameter's, or overwritten.
        is_direct: Whether the model copies without the tensor's loader, by which a reload waits.
    """

    target: Target
    local_start: int
    num_elements: int
    names: frozenset[str]
    global_start: int | None
    is_computed: bool
    is_direct: bool


@dataclass(frozen=True, slots=True)
class TracedLoading:
    """Outcome of loading some parameters.

    Args:
        fills: Fills in the order of loading, by checkpoint parameter.
        saved_names: Parameters that vLLM knows only by the names and shapes of files on disk.
        loadable: Tensors that exist before vLLM processes what was loaded.
    """

    fills: Mapping[str, Sequence[Fill]]
    saved_names: frozenset[str]
    loadable: frozenset[Target]

    def targets(self, name: str) -> tuple[Target, ...]:
        """Return the tensors that a parameter reaches."""
        return tuple(dict.fromkeys(fill.target for fill in self.fills.get(name, ())))

    @property
    def direct_modules(self) -> frozenset[str]:
        """Modules with a tensor that the model fills without its loader."""
        fills = (fill for fills in self.fills.values() for fill in fills)
        return frozenset(fill.target[0] for fill in fills if fill.is_direct)

    def is_computed(self, name: str) -> bool:
        """Return whether vLLM's tensors hold other values than a parameter's."""
        return any(fill.is_computed for fill in self.fills.get(name, ()))

    def exact_fills(self, name: str, num_elements: int) -> tuple[Fill, ...]:
        """Return the fills of a parameter that lies unchanged in vLLM's tensors, or ()."""
        fills = self.fills[name]
        total = sum(fill.num_elements for fill in fills)
        is_exact = total == num_elements and all(f.global_start is not None for f in fills)
        return tuple(fills) if is_exact else ()


class _Notes(TorchDispatchMode):
    """Notes of copies into vLLM's tensors, which are not executed."""

    def __init__(self, targets: Mapping[int, Target]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fills: list[Fill] = []
        self.num_open_loaders = 0
        self._targets = targets
        # By storage. Tensors are kept, or a later one would have an earlier one's address.
        self._names: dict[int, frozenset[str]] = {}
        self._whole: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []

    def parameter(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor without memory whose copies are noted under a name."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._whole[_storage(tensor)] = name
        self._keep(tensor, frozenset({name}))
        return tensor

    @property
    def names(self) -> frozenset[str]:
        """Parameters that reached a tensor."""
        return frozenset(name for fill in self.fills for name in fill.names)

    def names_of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the parameters from which a tensor is made."""
        return self._names.get(_storage(tensor), frozenset())

    def _keep(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        self._names[_storage(tensor)] = names
        self._kept.append(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        kwargs = dict(kwargs or {})
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        names = frozenset[str]().union(*(self.names_of(each) for each in inputs))
        if func._schema.is_mutable:
            is_copy = func is torch.ops.aten.copy_.default
            self._note(args[0], args[1] if is_copy else None, names)
            return args[0]
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        if any(each.is_meta for each in inputs) and kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        output = func(*args, **kwargs)
        if func in _COPIES:
            self._note_whole(args[0], output)
        self._keep_new(output, names)
        return output

    def _note_whole(self, source: torch.Tensor, made: torch.Tensor) -> None:
        """Note that a tensor is a copy of a whole parameter, perhaps in another dtype."""
        is_whole = source.untyped_storage().nbytes() == source.nbytes and source.is_contiguous()
        name = self._whole.get(_storage(source))
        if name is not None and is_whole and made.is_contiguous():
            self._whole[_storage(made)] = name

    def _keep_new(self, output: object, names: frozenset[str]) -> None:
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and _storage(each) not in (
                self._targets.keys() | self._names.keys()
            ):
                self._keep(each, names)

    def _note(
        self, filled: torch.Tensor, values: torch.Tensor | None, names: frozenset[str]
    ) -> None:
        target = self._targets.get(_storage(filled))
        if target is None:
            self._keep(filled, names | self.names_of(filled))
            return
        start, stop = _extent(filled)
        self._forget_exact(target, start, stop)
        if not names:
            return
        is_unchanged = values is not None and _storage(values) in self._whole
        first = None
        if is_unchanged and values is not None and values.shape == filled.shape:
            is_range = values.is_contiguous() and filled.is_contiguous()
            first = int(values.storage_offset()) if is_range else None
        is_direct = self.num_open_loaders == 0
        fill = Fill(target, start, filled.numel(), names, first, not is_unchanged, is_direct)
        self.fills.append(fill)

    def _forget_exact(self, target: Target, start: int, stop: int) -> None:
        """Note that elements are overwritten, by padding or by values computed of them."""
        for place, fill in enumerate(self.fills):
            end = fill.local_start + fill.num_elements
            if fill.target == target and fill.local_start < stop and start < end:
                self.fills[place] = replace(fill, global_start=None, is_computed=True)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of a storage's elements that a tensor spans."""
    start = int(tensor.storage_offset())
    spans = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (sum(spans) + 1 if tensor.numel() else 0)


@contextmanager
def unprocessed(model: nn.Module) -> Iterator[None]:
    """Replace vLLM's tensors by those that loaders fill, without memory."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
    from vllm.model_executor.model_loader.reload.sanitize import sanitize_layer_refs

    wrapped = [
        (parent, name, child, child.get_submodule("base_layer"))
        for parent in model.modules()
        for name, child in parent.named_children()
        if "base_layer" in child._modules
    ]
    for parent, name, _, plain in wrapped:  # loaders do not know wrappers of adapters
        parent._modules[name] = plain
    kept = [
        (each, dict(each._parameters), dict(each._buffers), set(each._non_persistent_buffers_set))
        for each in model.modules()
    ]
    try:
        for layer in list(model.modules()):
            restore_layer_on_meta(layer, get_layerwise_info(layer))
        yield
    finally:
        for parent, name, child, _ in wrapped:
            parent._modules[name] = child
        for layer, parameters, buffers, names in kept:
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(names)
            for tensors in get_layerwise_info(layer).restore_metadata:
                for tensor in tensors.values():
                    sanitize_layer_refs(tensor, layer)  # they would keep the layer alive


@torch.no_grad()
def trace_loading(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    checkpoint_model: PreTrainedModel | None,
) -> TracedLoading:
    """Load parameters one by one and return what they fill.

    Args:
        model: vLLM's model.
        modules: Its modules by name.
        shapes: Parameters to load, with their shapes.
        dtype: Their type.
        checkpoint_model: Model of transformers, by whose rules the names on disk are made.
    """
    with unprocessed(model):
        filled = {
            _storage(tensor): ((module_name, attribute), tensor)
            for module_name, module in reversed(list(modules.items()))
            for attribute, tensor in {**module._parameters, **module._buffers}.items()
            if tensor is not None
        }
        notes = _Notes({storage: target for storage, (target, _) in filled.items()})
        with notes, _noted_loaders([tensor for _, tensor in filled.values()], notes):
            tensors = {name: notes.parameter(name, shape, dtype) for name, shape in shapes.items()}
            _load(model, tensors)
            absent = {n: tensor for n, tensor in tensors.items() if n not in notes.names}
            for name, tensor in absent.items():  # after one that the model has no place for
                _load(model, {name: tensor})
            absent = {n: tensor for n, tensor in absent.items() if n not in notes.names}
            if absent and checkpoint_model is not None:
                for name, tensor in saved_tensors(checkpoint_model, absent).items():
                    _load(model, {name: tensor})
    fills: dict[str, list[Fill]] = {}
    for fill in notes.fills:
        for name in fill.names:
            fills.setdefault(name, []).append(fill)
    loadable = frozenset(target for target, _ in filled.values())
    return TracedLoading(fills, frozenset(absent) & fills.keys(), loadable)


def _load(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load tensors up to the first for which vLLM's model has no place."""
    try:
        model.load_weights(iter(tensors.items()))  # type: ignore[operator]
    except Exception:  # noqa: BLE001 - the code of a model, which has many ways to miss a name
        return


@contextmanager
def _noted_loaders(tensors: Sequence[torch.Tensor], notes: _Notes) -> Iterator[None]:
    """Let the loader of each tensor tell when it runs, as a reload wraps it."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    def noted(load: Callable[..., object]) -> Callable[..., object]:
        @wraps(load)
        def loads(*args: object, **options: object) -> object:
            notes.num_open_loaders += 1
            try:
                return load(*args, **options)
            finally:
                notes.num_open_loaders -= 1

        return loads

    loaders = [(each, getattr(each, "weight_loader", default_weight_loader)) for each in tensors]
    try:
        for tensor, load in loaders:
            tensor.weight_loader = noted(load)  # type: ignore[attr-defined]
        yield
    finally:
        for tensor, load in loaders:
            tensor.weight_loader = load  # type: ignore[attr-defined]


def saved_tensors(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return tensors under the names and in the shapes of files on disk."""
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return saved

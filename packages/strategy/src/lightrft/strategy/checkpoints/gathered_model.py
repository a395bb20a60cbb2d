"""Hugging Face files of models whose parameters are sharded over ranks."""

import copy
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightrft.config.files import make_folder, read_object, weight_files
from lightrft.engines.nf4 import names_in_files
from lightrft.engines.process_state import deepspeed_unless_used
from lightrft.strategy.checkpoints.files import StoredTensor, stored_tensors
from lightrft.strategy.distributed.collectives import ALONE, nonfinite_names, require_finite
from lightrft.strategy.distributed.process_end import CheckpointError
from lightrft.strategy.weight_sync.parameter_source import (
    AdaptedModel,
    exported_state,
    tied_parameter_names,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightTransform

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
# Large enough for a disk, and small beside a shard.
PIECE_BYTES = 8 * 2**20
# The part of a layer's name that peft adds where it puts adapters.
BASE_LAYER = ".base_layer"


@runtime_checkable
class SavesPretrained(Protocol):
    """Models and tokenizers that write themselves in Hugging Face format."""

    def save_pretrained(self, directory: Path) -> object:
        """Write into a folder."""


def pretrained_prefix(module: nn.Module) -> str | None:
    """Return the place of the transformers model in a module: "", "model.", "trunk."; or None."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        return ""
    for name, child in module.named_children():
        if isinstance(child, PreTrainedModel):
            return f"{name}."
    return None


def save_gathered_model(
    module: nn.Module,
    state: Mapping[str, Tensor],
    tokenizer: object | None,
    folder: Path,
    *,
    dtype: torch.dtype,
) -> None:
    """Write full values in Hugging Face format; call it on one rank.

    The transformers model inside becomes the checkpoint. Other children of the wrapper, such as a
    value head, become `<child>.safetensors` beside it. Adapters, which are part of the weights,
    become a folder `adapter`. Without a transformers model everything goes into one
    `model.safetensors`.

    Args:
        module: The actor, critic or bare model; only its configuration and names are read.
        state: Full CPU tensors by name in `module`, tied ones under their first name, in
            `parameter_source.gathered_dtype`.
        tokenizer: Tokenizer to write beside it, or None.
        folder: Target; created if needed.
        dtype: Type of the floating point values in the files.

    Raises:
        TypeError: The tokenizer cannot be saved.
        NonFiniteError: A parameter is not finite in `dtype`; nothing was written.
    """
    from transformers import PreTrainedModel

    if tokenizer is not None and not isinstance(tokenizer, SavesPretrained):
        raise TypeError(f"cannot save a tokenizer of type {type(tokenizer).__name__}")
    stored, state = state, exported_state(module, state, dtype)
    buffers = dict(module.named_buffers())
    trained = [(name, value) for name, value in state.items() if name not in buffers]
    require_finite(nonfinite_names(trained), what="weights are", group=ALONE)
    make_folder(folder)
    prefix = pretrained_prefix(module)
    if prefix is None:
        save_file(dict(state), folder / WEIGHTS_NAME)
    else:
        pretrained = module.get_submodule(prefix.rstrip("."))
        if not isinstance(pretrained, PreTrainedModel):
            raise TypeError(f"expected a transformers model, got {type(pretrained).__name__}")
        values = _under(state, prefix)
        for second, first in tied_parameter_names(pretrained).items():
            values[second] = values[first]
        # A copy, because transformers empties the dictionary while it writes.
        with deepspeed_unless_used():
            pretrained.save_pretrained(folder, state_dict=dict(values))
        _write_dtype(folder / CONFIG_NAME, values)
        for name, _ in module.named_children() if prefix else ():
            child = _under(state, f"{name}.")
            if f"{name}." != prefix and child:
                save_file(child, folder / f"{name}.safetensors")
    if isinstance(module, AdaptedModel):
        module.save_adapters(stored, folder / "adapter")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries below a prefix, without the prefix."""
    return {name[len(prefix) :]: v for name, v in state.items() if name.startswith(prefix)}


def _write_dtype(config_file: Path, values: Mapping[str, Tensor]) -> None:
    """Write the files' dtype into the configuration: the model itself may hold another."""
    dtypes = [value.dtype for value in values.values() if value.is_floating_point()]
    config = read_object(config_file)
    config["dtype"] = str(max(set(dtypes), key=dtypes.count)).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def as_saved(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a CPU copy for a file, floating point values in `dtype`."""
    target = dtype if value.is_floating_point() else value.dtype
    return value.detach().to("cpu", target, copy=True).contiguous()


@dataclass(frozen=True, slots=True)
class _Made:
    """Tensors of a model that transformers makes of others: merged experts, a reshaped kernel.

    Args:
        model: Model that has the tensors.
        converter: Converter that makes them.
        name: Name of the first of them, by which the converter knows them.
        sources: Tensors that they are made of, by the pattern of their names.
    """

    model: "PreTrainedModel"
    converter: "WeightConverter"
    name: str
    sources: dict[str, list[StoredTensor]] = field(default_factory=dict)

    def values(
        self, read: Callable[[StoredTensor], Tensor], rows: slice = slice(None)
    ) -> dict[str, Tensor]:
        """Return tensors by name, made of what `read` returns; some rows of a stack."""
        converter = copy.deepcopy(self.converter)
        for pattern, sources in self.sources.items():
            for stored in sources[rows]:
                converter.add_tensor(self.name, stored.name, pattern, read(stored))
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }

    @property
    def is_stack(self) -> bool:
        """Return whether a row is made of one source of each kind, as with experts."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        first, *others = self.converter.operations
        is_merged = isinstance(first, MergeModulelist) and first.dim == 0
        return is_merged and all(isinstance(op, Concatenate) and op.dim > 0 for op in others)


class WeightFiles:
    """The tensors of a safetensors file or of a checkpoint folder, read in parts.

    Args:
        path: A `.safetensors` file, or a folder with `model*.safetensors` and possibly files of
            further children such as `value_head.safetensors`.
        module: Model that they are for; names are those of the module.

    Attributes:
        conversions: Rules by which transformers renames or converts tensors of the files.

    Raises:
        FileNotFoundError: There are no weights.
    """

    def __init__(self, path: Path, module: nn.Module) -> None:
        self._path, self._stored = path, dict[str, StoredTensor]()
        # By name in the module: the object that makes a tensor, and the tensor's name there.
        self._made: dict[str, tuple[_Made, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._last: tuple[_Made, dict[str, Tensor]] | None = None
        self.conversions: list[WeightTransform] = []
        prefix = pretrained_prefix(module)
        files = [path] if path.is_file() else weight_files(path)
        if not files:
            raise FileNotFoundError(f"no model*.safetensors in {path}")
        stored = {each.name: each for file in files for each in stored_tensors(file)}
        if prefix is None:
            self._stored = stored
        else:
            model = module.get_submodule(prefix.rstrip("."))
            self._add_renamed(cast("PreTrainedModel", model), prefix, stored)
        for name, _ in module.named_children() if prefix and path.is_dir() else ():
            extra = path / f"{name}.safetensors"
            if f"{name}." != prefix and extra.is_file():
                self._stored |= {f"{name}.{each.name}": each for each in stored_tensors(extra)}
        self._add_tied(module)
        self._shapes |= {name: each.shape for name, each in self._stored.items()}

    def _add_tied(self, module: nn.Module) -> None:
        """Make a tied parameter available by both names: a checkpoint may have either."""
        for second, first in tied_parameter_names(module).items():
            for name, other in ((first, second), (second, first)):
                if name in self._stored:
                    self._stored.setdefault(other, self._stored[name])

    def _add_renamed(
        self, model: "PreTrainedModel", prefix: str, stored: Mapping[str, StoredTensor]
    ) -> None:
        """Name tensors as in the module, by the rules with which transformers loads a model."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )

        names = names_in_files(model, model.state_dict())
        state = {name.replace(BASE_LAYER, ""): name for name in names}
        rules = get_model_conversion_mapping(model)
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        of_pattern = {p: converter for converter in converters for p in converter.source_patterns}
        groups: dict[str, _Made] = {}
        for key in sorted(stored, key=dot_natural_key):
            place = (model.base_model_prefix, state)
            name, pattern = rename_source_key(key, renamings, converters, *place)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], *place)
            if pattern is None or name not in state:
                self._stored.setdefault(prefix + state.get(name, name), stored[key])
            else:
                made = groups.setdefault(name, _Made(model, of_pattern[pattern], name))
                made.sources.setdefault(pattern, []).append(stored[key])
        for made in groups.values():
            empty = made.values(lambda each: torch.empty(each.shape, device="meta"))
            for name, value in empty.items():
                self._made[prefix + state.get(name, name)] = made, name
                self._shapes[prefix + state.get(name, name)] = tuple(value.shape)
        self.conversions = [rule for rule in rules if rule.was_used()]

    @property
    def names(self) -> set[str]:
        """All names, as in the module."""
        return set(self._shapes)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor; the whole of a scalar."""
        if name in self._made:
            made, its_name = self._made[name]
            if made.is_stack:
                return made.values(StoredTensor.read, slice(start, stop))[its_name]
            if self._last is None or self._last[0] is not made:
                self._last = None  # before others take memory
                self._last = made, made.values(StoredTensor.read)
            return self._last[1][its_name][start:stop]
        return self._stored[name].read(slice(start, stop))

    def read_into(
        self, name: str, target: Tensor, start: int, stop: int, shape: tuple[int, ...]
    ) -> None:
        """Copy rows [start, stop) into `target`, in pieces of at most `PIECE_BYTES`.

        Raises:
            CheckpointError: The tensor has another shape.
        """
        if self.shape(name) != shape:
            where = self._stored[name].file if name in self._stored else "its files"
            raise CheckpointError(
                f"{name} has shape {self.shape(name)} in {where}, expected {shape}"
            )
        if not target.dim():
            target.copy_(self.rows(name, start, stop))
        if not target.dim() or not target.numel():
            return
        row_bytes = target[0].numel() * max(target.element_size(), 4)
        step = max(1, PIECE_BYTES // row_bytes)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            target[first - start : last - start].copy_(self.rows(name, first, last))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def name_in_file(self, name: str) -> str:
        """Return the name that a tensor has in its file; its own if it is made of several."""
        return self._stored[name].name if name in self._stored else name

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors of the files, or one by two names, hold the same numbers."""
        first, second = self._stored[name], self._stored[other]
        return first == second or torch.equal(first.read(), second.read())


def check_names(wanted: set[str], found: set[str], *, source: str, strict: bool) -> set[str]:
    """Return names that can be read; log the others.

    Raises:
        CheckpointError: With `strict`, if names are missing or unexpected.
    """
    missing, unexpected = sorted(wanted - found), sorted(found - wanted)
    if not missing and not unexpected:
        return wanted
    text = (
        f"{source} does not fit the model: {len(missing)} names are missing {missing[:3]}, "
        f"{len(unexpected)} are unexpected {unexpected[:3]}"
    )
    if strict:
        raise CheckpointError(text)
    logger.warning(text)
    return wanted & found

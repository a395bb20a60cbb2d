"""Hugging Face files of models whose parameters are sharded over ranks."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lightrft.config.files import make_folder, read_object, regular_file, weight_files
from lightrft.engines.process_state import deepspeed_unless_used
from lightrft.strategy.checkpoints.errors import CheckpointError
from lightrft.strategy.distributed.collectives import ALONE, nonfinite_names, require_finite
from lightrft.strategy.weight_sync.parameter_source import (
    AdaptedModel,
    exported_state,
    tied_parameter_names,
)

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
# Large enough for a disk, and small beside a shard.
PIECE_BYTES = 8 * 2**20


@runtime_checkable
class SavesPretrained(Protocol):
    """Models and tokenizers that write themselves in Hugging Face format."""

    def save_pretrained(self, directory: Path) -> object:
        """Writes into a folder."""


def pretrained_prefix(module: nn.Module) -> str | None:
    """Place of the transformers model in a module: "", "model.", "trunk."; None without one."""
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
    """Write full values in Hugging Face format; to be called on one rank.

    The transformers model inside becomes the checkpoint; other children of the wrapper, such as a
    value head, become `<child>.safetensors` beside it, and adapters, which are part of the
    weights, a folder `adapter`. Without a transformers model everything goes into one
    `model.safetensors`.

    Args:
        module: The actor, critic or bare model; only its configuration and names are read.
        state: Full CPU tensors by name in `module`, tied ones under their first name, in
            `parameter_source.gathered_dtype`.
        tokenizer: Written beside it; None writes none.
        folder: Created if needed.
        dtype: Of the floating point values of the files.

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
        pretrained = module.get_submodule(prefix.rstrip(".")) if prefix else module
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
            own = _under(state, f"{name}.")
            if f"{name}." != prefix and own:
                save_file(own, folder / f"{name}.safetensors")
    if isinstance(module, AdaptedModel):
        module.save_adapters(stored, folder / "adapter")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries below a prefix, under their names there."""
    return {name[len(prefix) :]: v for name, v in state.items() if name.startswith(prefix)}


def _write_dtype(config_file: Path, values: Mapping[str, Tensor]) -> None:
    """Say in the configuration which dtype was written: the model itself may hold another."""
    dtypes = [value.dtype for value in values.values() if value.is_floating_point()]
    config = read_object(config_file)
    config["dtype"] = str(max(set(dtypes), key=dtypes.count)).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def as_saved(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A CPU copy for a file, floating point values in `dtype`."""
    target = dtype if value.is_floating_point() else value.dtype
    return value.detach().to("cpu", target, copy=True).contiguous()


class WeightFiles:
    """The tensors of a safetensors file or of a checkpoint folder, read in parts.

    Args:
        path: A `.safetensors` file, or a folder with `model*.safetensors` and possibly files of
            further children such as `value_head.safetensors`.
        module: The model they are for; names are given as in it.

    Raises:
        FileNotFoundError: There are no weights.
    """

    def __init__(self, path: Path, module: nn.Module) -> None:
        self._files: dict[str, tuple[Path, str]] = {}
        prefix = pretrained_prefix(module) or ""
        files = [path] if path.is_file() else weight_files(path)
        if not files:
            raise FileNotFoundError(f"no model*.safetensors in {path}")
        for file in files:
            self._add(file, prefix)
        for name, _ in module.named_children() if prefix and path.is_dir() else ():
            extra = path / f"{name}.safetensors"
            if f"{name}." != prefix and extra.is_file():
                self._add(extra, f"{name}.")
        # A checkpoint may name a tied parameter either way.
        for second, first in tied_parameter_names(module).items():
            for name, other in ((first, second), (second, first)):
                if name in self._files:
                    self._files.setdefault(other, self._files[name])

    def _add(self, file: Path, prefix: str) -> None:
        with safe_open(regular_file(file), "pt") as stream:
            for name in stream.keys():  # noqa: SIM118  # not a mapping
                self._files[prefix + name] = (file, name)

    @property
    def names(self) -> set[str]:
        """All names, as in the module."""
        return set(self._files)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor; the whole of a scalar."""
        file, stored_name = self._files[name]
        with safe_open(regular_file(file), "pt") as stream:
            part = stream.get_slice(stored_name)
            found: Tensor = part[start:stop] if part.get_shape() else stream.get_tensor(stored_name)
            return found

    def read_into(
        self, name: str, target: Tensor, start: int, stop: int, shape: tuple[int, ...]
    ) -> None:
        """Copy rows [start, stop) into `target`, in pieces of at most `PIECE_BYTES`.

        Raises:
            CheckpointError: The tensor has not this shape.
        """
        if self.shape(name) != shape:
            raise CheckpointError(
                f"{name} has shape {self.shape(name)} in {self._files[name][0]}, expected {shape}"
            )
        if not target.dim() or not target.numel():
            target.copy_(self.rows(name, start, stop))
            return
        row_bytes = target[0].numel() * max(target.element_size(), 4)
        step = max(1, PIECE_BYTES // row_bytes)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            target[first - start : last - start].copy_(self.rows(name, first, last))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        file, stored_name = self._files[name]
        with safe_open(regular_file(file), "pt") as stream:
            return tuple(stream.get_slice(stored_name).get_shape())


def check_names(wanted: set[str], found: set[str], *, source: str, strict: bool) -> set[str]:
    """Names that can be read; the others are logged.

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

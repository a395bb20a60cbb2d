"""Kept verdicts of the proof at load: a model that was proved as it is is not tried again.

A verdict belongs to all that a proof sees: weights, configuration, settings and hooks of layers,
the code in memory, options, versions and device. A proof that had to change the model is not kept,
nor one of rows with media.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from types import CodeType, FunctionType

import torch
from torch import nn

from lightrft.config import BackendOptions, BuildOptions
from lightrft.config.files import FileError, read_object, sealed, unsealed
from lightrft.config.toml import write_whole
from lightrft.engines.hf.attention import unfused_layers
from lightrft.engines.media.text_encoder import Encoder, TextEncoder
from lightrft.kernels import hash_tensors
from lightrft.models import SequenceModel
from lightrft.reporting.files import cache_folder, package_versions
from lightrft.strategy.backend import inner_module
from lightrft.strategy.distributed.context import DistributedContext

# Packages, and modules of others, whose code decides what a pass computes.
_PACKAGES = (
    "lightrft",
    "torch",
    "transformers",
    "numpy",
    "causal-conv1d",
    "flash-linear-attention",
)
_CODE = (
    "lightrft.models",
    "lightrft.engines.hf",
    "lightrft.stages.models",
    "torch.nn.functional",
    "transformers.integrations",
    "transformers.masking_utils",
    "transformers.modeling_",
)
# Modules without code of passes, or with a number that every process draws.
_OF_PROCESSES = {"builtins", "transformers.utils.hub"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# What a model notes of its layout and of its proof.
_NOTES = {"_plain_attention", "is_separated", "is_proved", "reads_media"}
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)


def proof_key(
    config: BuildOptions, context: DistributedContext, models: Sequence[nn.Module | None], kept: str
) -> str:
    """Return a hash of all that a proof of these models sees; other on each rank.

    Args:
        config, context: Options of the run, and its ranks.
        models: Prepared models that are to be proved, with padded rows.
        kept: Dropout that acts.
    """
    names = sorted({each.name for kind in (BuildOptions, BackendOptions) for each in fields(kind)})
    device = torch.cuda.get_device_name() if context.device.type == "cuda" else "cpu"
    place = (context.rank, context.world_size, device, torch.get_num_threads(), kept)
    digest = hashlib.sha256(repr((place, sys.version, package_versions(_PACKAGES))).encode())
    facts = [f"{name}={vars(config)[name]!r}" for name in names]
    present = [model for model in models if model is not None]
    for model in present:
        facts += _of_model(model)
    seen: set[int] = set()
    for name in sorted(_code_modules(present)):
        for key, value in sorted(vars(sys.modules[name]).items()):
            facts += [f"{name}.{key}", *_of_code(value, name, seen)]
    for fact in facts:
        digest.update(f"{fact}\n".encode())
    return digest.hexdigest()


def find_proof(
    config: BuildOptions,
    context: DistributedContext,
    models: Sequence[nn.Module | None],
    *,
    kept: str,
    encoder: Encoder,
) -> str:
    """Mark models as proved if a verdict is kept under the key of every rank; collective.

    Args:
        config, context, models, kept: As for `proof_key`.
        encoder: Encoder of rows; with media nothing is kept.

    Returns:
        Key for `keep_proof`; "" where nothing is kept.
    """
    inner = [inner_module(model) for model in models if model is not None]
    fresh = [each for each in inner if isinstance(each, SequenceModel) and not each.is_proved]
    is_kept = isinstance(encoder, TextEncoder) and config.fsdp and config.shared_prefix == "off"
    if not is_kept or len(fresh) < len(inner):
        return ""
    key, is_missing = "", True
    # Weights of a kind that has no hash, or files that cannot be read: the models are proved.
    with suppress(RuntimeError, TypeError, ValueError, OSError, FileError):
        key = proof_key(config, context, models, kept)
        path = cache_folder("proof") / key
        is_missing = unsealed(read_object(path), path) != {"proved": key}
    if not context.all_reduce(float(is_missing), op="max"):
        for module in fresh:
            module.is_proved = module.is_separated = True
        context.print_detail("models are those of a kept proof")
    return key


def keep_proof(
    key: str,
    config: BuildOptions,
    context: DistributedContext,
    models: Sequence[nn.Module | None],
    *,
    kept: str,
) -> None:
    """Keep the verdict of a proof that left the models as they were; see `find_proof`."""
    modules = [m for m in map(inner_module, filter(None, models)) if isinstance(m, SequenceModel)]
    # Of eager layers a line is printed, which each run must show.
    if not key or any(unfused_layers(module.pretrained) for module in modules):
        return
    for module in modules:
        module.pack_samples(False)
    is_same = proof_key(config, context, models, kept) == key
    for module in modules:
        module.pack_samples(bool(config.packing_samples))
    if is_same:
        with suppress(RuntimeError, OSError):
            folder = cache_folder("proof")
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / key, sealed({"proved": key}))


def _of_model(model: nn.Module) -> Iterator[str]:
    """Yield the layers of a model with their settings and hooks, and hashes of its weights."""
    inner = inner_module(model)
    if isinstance(inner, SequenceModel):
        yield repr(sorted(map(repr, inner.config.to_dict().items())))
        yield str(inner.config.get_text_config()._attn_implementation)
    for name, layer in model.named_modules():
        names = sorted(vars(layer).keys() - _NOTES)
        settings = [(n, vars(layer)[n]) for n in names if isinstance(vars(layer)[n], _PLAIN)]
        kind = type(layer)
        yield f"{name} {kind.__module__}.{kind.__qualname__} {settings}"
        functions = [v for v in vars(layer).values() if isinstance(v, FunctionType)]
        hooks = [hook for kind in _HOOKS for hook in getattr(layer, kind).values()]
        for function in (*functions, *hooks):
            yield from _of_code(function, "", set())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    local = [_local(each) for each in tensors.values()]
    for (name, value), number in zip(tensors.items(), hash_tensors(local), strict=True):
        yield f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad} {number}"


def _local(value: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = getattr(value, "_local_tensor", value).detach()
    return part


def _code_modules(models: Sequence[nn.Module]) -> set[str]:
    """Return the names of loaded modules whose code a pass of the models may run."""
    kinds = {type(layer) for model in models for layer in model.modules()}
    names = {each.__module__ for kind in kinds for each in kind.__mro__}
    names |= {name for name in sys.modules if name.startswith(_CODE)}
    return {name for name in names - _OF_PROCESSES if name in sys.modules}


def _of_code(value: object, home: str, seen: set[int]) -> Iterator[str]:
    """Yield what a function, or a class of a module, computes: its bytecode and its constants."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, tuple):
        for each in value:
            yield from _of_code(each, home, seen)
    elif isinstance(value, frozenset):
        yield repr(sorted(map(repr, value)))
    elif isinstance(value, CodeType):
        yield f"{value.co_code.hex()} {value.co_names} {value.co_varnames}"
        yield from _of_code(value.co_consts, home, seen)
    elif isinstance(value, type) and value.__module__ != home:  # its own module has its code
        yield f"{value.__module__}.{value.__qualname__}"
    elif id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value, home):
            yield from _of_code(part, home, seen)


def _parts(value: object, home: str) -> Sequence[object]:
    """Return the parts of a value that has code; its kind for others."""
    if isinstance(value, FunctionType):
        cells: list[object] = []
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # of a name that has no value yet
                cells.append(cell.cell_contents)
        return [value.__code__, value.__defaults__, *cells]
    if isinstance(value, dict):  # tables of functions, such as those of attention
        return [each for each in value.values() if isinstance(each, FunctionType)]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, functools.cached_property | functools.partial):
        return [value.func]
    if isinstance(value, type):
        return [each for _, each in sorted(vars(value).items())]
    return [f"{type(value).__module__}.{type(value).__qualname__}"]

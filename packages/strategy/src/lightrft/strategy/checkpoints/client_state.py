"""State beside the weights: caller's values and random number generators, without pickle.

A nested mapping is written as one JSON file; its tensors go to a safetensors file beside it.
Tuples, tensors and numpy values keep their type, so that a load returns what was saved.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config.files import read_object, regular_file
from lightrft.config.printable import one_line
from lightrft.strategy.checkpoints.errors import CheckpointError
from lightrft.strategy.checkpoints.files import FileWriter

SCHEDULER_NAME = "scheduler"
_TENSOR = "__tensor__"
_TUPLE = "__tuple__"
_ARRAY = "__array__"
_RESERVED = (_TENSOR, _TUPLE, _ARRAY)


def save_state(path: Path, state: Mapping[str, object], files: FileWriter) -> None:
    """Write a nested state to `path` with suffix .json, and its tensors to .safetensors.

    Args:
        path: Target without a suffix.
        state: Mappings with string keys, lists, tuples, None, bool, int, float, str, tensors and
            numpy arrays or scalars, nested at will.
        files: Writer of the files.

    Raises:
        TypeError: A value has another type; the message names its place in the state.
    """
    tensors: dict[str, torch.Tensor] = {}
    encoded = _encode(state, place="state", tensors=tensors)
    if tensors:
        files.tensors(path.with_name(path.name + ".safetensors"), tensors)
    files.text(path.with_name(path.name + ".json"), json.dumps(encoded))


def load_state(path: Path) -> dict[str, object]:
    """Read what `save_state` wrote; `path` has no suffix.

    Raises:
        CheckpointError: `save_state` did not write it.
    """
    tensor_file = path.with_name(path.name + ".safetensors")
    try:
        values = read_object(path.with_name(path.name + ".json"))
        tensors = load_file(regular_file(tensor_file)) if tensor_file.exists() else {}
        state = _decode(values, tensors)
    except (ValueError, LookupError, TypeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: no state: {one_line(str(error))}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}.json: expected an object, got {type(state).__name__}")
    return state


def _encode(value: object, *, place: str, tensors: dict[str, torch.Tensor]) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor | np.ndarray):
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        tensors[place] = tensor
        return {_ARRAY if isinstance(value, np.ndarray) else _TENSOR: place}
    if isinstance(value, list | tuple):
        items = [
            _encode(item, place=f"{place}[{i}]", tensors=tensors) for i, item in enumerate(value)
        ]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict):
        return {
            _checked_key(key, place): _encode(item, place=f"{place}.{key}", tensors=tensors)
            for key, item in value.items()
        }
    raise TypeError(
        f"client_state cannot hold {type(value).__name__} at {place}: expected None, bool, int, "
        "float, str, list, tuple, dict with string keys, a tensor or a numpy value"
    )


def _checked_key(key: object, place: str) -> str:
    if not isinstance(key, str) or key in _RESERVED:
        raise TypeError(
            f"client_state needs string keys other than {_RESERVED}: got {key!r} at {place}"
        )
    return key


def _decode(value: object, tensors: Mapping[str, torch.Tensor]) -> object:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_TENSOR}:
        return tensors[value[_TENSOR]]
    if set(value) == {_ARRAY}:
        return tensors[value[_ARRAY]].numpy()
    if set(value) == {_TUPLE}:
        return tuple(_decode(item, tensors) for item in value[_TUPLE])
    return {key: _decode(item, tensors) for key, item in value.items()}


def capture_rng_state() -> dict[str, object]:
    """Return states of this process's generators: python, numpy, torch on CPU and CUDA."""
    numpy_state = np.random.get_state(legacy=True)  # noqa: NPY002  # the global generator is meant
    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": tuple(numpy_state),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng_state(state: Mapping[str, object]) -> None:
    """Set this process's generators to what `capture_rng_state` returned."""
    random.setstate(state["python"])  # type: ignore[arg-type]
    np.random.set_state(state["numpy"])  # type: ignore[arg-type]  # noqa: NPY002
    torch.set_rng_state(state["torch"])  # type: ignore[arg-type]
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])  # type: ignore[arg-type]


def save_scheduler(folder: Path, scheduler: LRScheduler, files: FileWriter) -> None:
    """Write a schedule's position."""
    save_state(folder / SCHEDULER_NAME, scheduler.state_dict(), files)


def load_scheduler(folder: Path, scheduler: LRScheduler) -> None:
    """Read a schedule's position.

    Raises:
        CheckpointError: The checkpoint has none.
    """
    if not (folder / f"{SCHEDULER_NAME}.json").is_file():
        raise CheckpointError(
            f"{folder} holds no scheduler: load it with load_lr_scheduler_states=False"
        )
    scheduler.load_state_dict(load_state(folder / SCHEDULER_NAME))

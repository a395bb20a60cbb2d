"""Files of a checkpoint: tensors, written at once or from copies, and plain values."""

import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config.files import read_object, regular_file
from lightrft.config.printable import one_line
from lightrft.strategy.distributed.process_end import CheckpointError

_PROBE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Args:
        file: The file.
        name, shape: Name and shape of the tensor there.
    """

    file: Path
    name: str
    shape: tuple[int, ...]

    def read(self, rows: slice = slice(None)) -> Tensor:
        """Return some rows of the tensor; the whole of a scalar."""
        with safe_open(regular_file(self.file), "pt") as stream:
            if not self.shape:
                scalar: Tensor = stream.get_tensor(self.name)
                return scalar
            selected: Tensor = stream.get_slice(self.name)[rows]
            return selected


def stored_tensors(file: Path) -> Iterator[StoredTensor]:
    """Yield all tensors of a safetensors file."""
    with safe_open(regular_file(file), "pt") as stream:
        for name in stream.keys():  # noqa: SIM118  # not a mapping
            yield StoredTensor(file, name, tuple(stream.get_slice(name).get_shape()))


class FileWriter:
    """Writer of one checkpoint's files from one rank; it writes each file at once."""

    def tensors(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write tensors of any device, which may share storage, as safetensors."""
        # safetensors refuses shared storage.
        copies = {
            name: value.detach().to("cpu", copy=True).contiguous()
            for name, value in tensors.items()
        }
        notes = None if metadata is None else dict(metadata)
        self._write(lambda: save_file(copies, path, notes))

    def pickled(self, path: Path, state: object, *, is_zip: bool = True) -> None:
        """Write a state by `torch.save`."""
        try:
            torch.save(state, path, _use_new_zipfile_serialization=is_zip)
        except RuntimeError:
            # torch reports positions in the file; the system's error says that the disk is full.
            with path.open("ab") as stream:
                stream.write(bytes(_PROBE_BYTES))
            raise

    def text(self, path: Path, text: str) -> None:
        """Write a text file."""
        self._write(lambda: path.write_text(text, encoding="utf-8"))

    def flush(self) -> None:
        """Write what is not yet written."""

    def _write(self, write: Callable[[], object]) -> None:
        write()


class StagedWriter(FileWriter):
    """Writer that copies everything to host memory; `flush` writes the files from any thread."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], object]] = []

    def pickled(self, path: Path, state: object, *, is_zip: bool = True) -> None:
        """Copy a state that `torch.save` will write."""
        buffer = io.BytesIO()
        torch.save(state, buffer, _use_new_zipfile_serialization=is_zip)
        self._write(lambda: path.write_bytes(buffer.getbuffer()))

    def _write(self, write: Callable[[], object]) -> None:
        self._pending.append(write)

    def flush(self) -> None:
        """Write the files in the order in which they came, and free their copies."""
        while self._pending:
            self._pending.pop(0)()


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

"""Files of a checkpoint: writers, at once or from copies and later; tensors read in parts."""

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightrft.config.files import regular_file

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

"""Writers of checkpoint files, at once or from copies and later."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

_PROBE_BYTES = 2**20


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

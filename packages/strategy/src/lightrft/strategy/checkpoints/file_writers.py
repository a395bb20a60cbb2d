"""How the files of a checkpoint are written: at once, or from copies and later."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor


class FileWriter(Protocol):
    """Receives the files of one checkpoint from one rank."""

    def tensors(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Writes tensors of any device, which may share storage, as safetensors."""

    def pickled(self, path: Path, state: object, *, is_zip: bool = True) -> None:
        """Writes a state by `torch.save`."""

    def text(self, path: Path, text: str) -> None:
        """Writes a text file."""


class DirectWriter:
    """Writes every file when it is told of it."""

    def tensors(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """See `FileWriter`."""
        save_file(_copies(tensors), path, None if metadata is None else dict(metadata))

    def pickled(self, path: Path, state: object, *, is_zip: bool = True) -> None:
        """See `FileWriter`."""
        torch.save(state, path, _use_new_zipfile_serialization=is_zip)

    def text(self, path: Path, text: str) -> None:
        """See `FileWriter`."""
        path.write_text(text, encoding="utf-8")


class StagedWriter:
    """Copies everything to host memory; `flush` writes the files, from any thread."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], object]] = []

    def tensors(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """See `FileWriter`."""
        copies = _copies(tensors)
        notes = None if metadata is None else dict(metadata)
        self._pending.append(lambda: save_file(copies, path, notes))

    def pickled(self, path: Path, state: object, *, is_zip: bool = True) -> None:
        """See `FileWriter`."""
        buffer = io.BytesIO()
        torch.save(state, buffer, _use_new_zipfile_serialization=is_zip)
        self._pending.append(lambda: path.write_bytes(buffer.getbuffer()))

    def text(self, path: Path, text: str) -> None:
        """See `FileWriter`."""
        self._pending.append(lambda: path.write_text(text, encoding="utf-8"))

    def flush(self) -> None:
        """Writes the files in the order in which they came, and frees their copies."""
        while self._pending:
            self._pending.pop(0)()


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies in host memory: safetensors refuses shared storage."""
    return {
        name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()
    }

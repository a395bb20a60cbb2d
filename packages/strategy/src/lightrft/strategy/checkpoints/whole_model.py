"""What a checkpoint folder in Hugging Face format is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS_NAME = "model.safetensors"


@runtime_checkable
class SavesPretrained(Protocol):
    """Models and tokenizers that write themselves in Hugging Face format."""

    def save_pretrained(self, directory: Path) -> object:
        """Writes into a folder."""

"""Reading and writing models whose parameters are whole in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from safetensors.torch import load_file, save_file

from lightrft.strategy.parameter_source import checkpoint_module, tied_parameter_names

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

WEIGHTS_NAME = "model.safetensors"


@runtime_checkable
class SavesPretrained(Protocol):
    """Models and tokenizers that write themselves in Hugging Face format."""

    def save_pretrained(self, directory: Path) -> object:
        """Writes into a folder."""


def save_whole_model(module: nn.Module, tokenizer: object | None, folder: Path) -> None:
    """Writes a model in Hugging Face format, and its tokenizer.

    A module that knows no such format is written as one safetensors file.

    Raises:
        TypeError: The tokenizer cannot be saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    inner = checkpoint_module(module)
    for candidate in (module, inner):
        if isinstance(candidate, SavesPretrained):
            candidate.save_pretrained(folder)
            break
    else:
        save_file(_distinct_tensors(inner), folder / WEIGHTS_NAME)
    if tokenizer is not None:
        if not isinstance(tokenizer, SavesPretrained):
            raise TypeError(f"cannot save a tokenizer of type {type(tokenizer).__name__}")
        tokenizer.save_pretrained(folder)


def _distinct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """State without second names of tied parameters, which share storage."""
    tied = tied_parameter_names(module)
    return {
        name: value.detach().cpu().contiguous()
        for name, value in module.state_dict().items()
        if name not in tied
    }


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of the weight files of a checkpoint folder.

    Raises:
        FileNotFoundError: There are none.
    """
    files = [path] if path.is_file() else sorted(path.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no model*.safetensors in {path}")
    return {name: value for file in files for name, value in load_file(file).items()}


def load_whole_model(module: nn.Module, path: Path, *, strict: bool = True) -> None:
    """Reads weights by checkpoint name into a model.

    Args:
        module: An actor (its child `model` is filled) or a bare model.
        path: A safetensors file or a checkpoint folder.
        strict: Whether missing and unexpected names are errors; a tied second name may be missing.

    Raises:
        FileNotFoundError: There are no weights.
        RuntimeError: Names or shapes do not fit.
    """
    target = checkpoint_module(module)
    tensors = read_weights(path)
    for second, first in tied_parameter_names(target).items():
        if first in tensors:
            tensors.setdefault(second, tensors[first])
        elif second in tensors:
            tensors[first] = tensors[second]
    target.load_state_dict(tensors, strict=strict)

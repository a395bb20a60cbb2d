"""Parts of a model whose weights are not trained, by the beginnings of their names."""

from __future__ import annotations

from collections.abc import Sequence

from lightrft.config import ConfigError
from lightrft.models.sequence_model import SequenceModel


def has_prefix(name: str, prefixes: Sequence[str]) -> bool:
    """Whether the dotted name of a layer or tensor begins with one of some others.

    The `model.` that a language model has before the names of its trunk may be left out.
    """
    return any(_plain(name).startswith(_plain(prefix)) for prefix in prefixes)


def _plain(name: str) -> str:
    return f"{name.rstrip('.')}.".removeprefix("model.")


def freeze(model: SequenceModel, prefixes: Sequence[str]) -> None:
    """Excludes all tensors below the prefixes from training; they stay in saved and sent weights.

    Args:
        model: Is changed in place, before a strategy prepares it.
        prefixes: Such as `visual`, or `model.language_model.layers.0`; () freezes nothing.

    Raises:
        ConfigError: No tensor has one of the prefixes, or nothing is left to train.
    """
    tensors = dict(model.pretrained.named_parameters())
    for prefix in prefixes:
        chosen = [value for name, value in tensors.items() if has_prefix(name, [prefix])]
        if not chosen:
            parts = sorted({".".join(_plain(name).split(".")[:2]) for name in tensors})
            raise ConfigError(
                f"freeze_prefix: no weights of {type(model.pretrained).__name__} begin with "
                f"{prefix!r}; there are {', '.join(parts[:12])}"
            )
        for value in chosen:
            value.requires_grad_(False)
    if not any(value.requires_grad for value in tensors.values()):
        raise ConfigError(
            f"freeze_prefix: {', '.join(prefixes)} leave nothing of "
            f"{type(model.pretrained).__name__} to train"
        )

"""A vision-language model that gives a whole conversation one number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightrft.models.loading import ModelLoadError, load_trunk, save_pretrained

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# transformers has sequence classifiers of hardly any vision-language model, so none of their form.
SCORE_FILE = "score.safetensors"


class VisionScorer(nn.Module):
    """A trunk and its head `score`, to be wrapped in a `RewardModel`.

    Args:
        trunk: A vision-language model up to its last hidden states.
        weight: [1, hidden] of the head.
    """

    def __init__(self, trunk: PreTrainedModel, weight: Tensor) -> None:
        super().__init__()
        trunk.config.num_labels = 1
        self.trunk = trunk
        self.score = nn.Linear(weight.shape[1], 1, bias=False, dtype=trunk.dtype)
        with torch.no_grad():
            self.score.weight.copy_(weight)

    @classmethod
    def from_pretrained(
        cls, path: str, *, dtype: str = "float32", allow_new_weights: Sequence[str] = ()
    ) -> VisionScorer:
        """Loads any checkpoint of a vision-language model with a head in `SCORE_FILE` beside it.

        Raises:
            ModelLoadError: See `load_trunk`; or there is no head that fits.
        """
        trunk = load_trunk(path, dtype=dtype, allow_new_weights=allow_new_weights)
        width, file = trunk.config.get_text_config().hidden_size, Path(path) / SCORE_FILE
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as err:
            raise ModelLoadError(
                f"the reward model {path!r} has no trained head: {SCORE_FILE} with a tensor "
                f"`weight` [1, {width}] is missing or damaged: {' '.join(str(err).split())}"
            ) from err
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != {"weight": (1, width)}:
            raise ModelLoadError(
                f"{file} holds {shapes}: expected one tensor `weight` of shape (1, {width})"
            )
        return cls(trunk, tensors["weight"])

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes what `from_pretrained` reads, without tokenizer and processor."""
        save_pretrained(self.trunk, None, directory)
        save_file({"weight": self.score.weight.detach()}, Path(directory) / SCORE_FILE)

    @property
    def config(self) -> PretrainedConfig:
        """Of the trunk."""
        return self.trunk.config

    @property
    def base_model(self) -> PreTrainedModel:
        """The trunk, as classifiers of transformers call it."""
        return self.trunk

"""The reward model: one number for a whole text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from lightrft.engines.media.families import family_of
from lightrft.engines.media.media import RowMedia
from lightrft.models.loading import (
    OTHER_HEADS,
    ModelLoadError,
    load_config,
    load_model,
    load_trunk,
    save_pretrained,
)
from lightrft.models.sequence_model import SequenceModel, trunk_output

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HEAD = "score"


def is_classifier(config: PretrainedConfig) -> bool:
    """Whether a checkpoint is a sequence classifier, by the class that wrote it."""
    return any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())


class ScoreHead(nn.Module):
    """The linear map of a classifier to one number, computed in float32.

    In bfloat16 scores between 4 and 8 would have steps of 0.03.

    Args:
        linear: Its weight is used, not copied.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Scores [rows, 1] float32 of hidden states [rows, hidden]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float())


class RewardModel(SequenceModel):
    """Sequence classifier with one output, the score of a token sequence.

    Args:
        model: A transformers model "for sequence classification" with one label and its head in
            the child `score`; or a `VisionScorer`.

    Raises:
        ValueError: It has more labels, or no such head.
    """

    is_actor = False

    def __init__(self, model: PreTrainedModel | VisionScorer) -> None:
        super().__init__()
        if model.config.num_labels != 1:
            raise ValueError(
                "a reward model has one label: got num_labels = "
                f"{model.config.num_labels} in {type(model).__name__}"
            )
        if HEAD not in dict(model.named_children()):
            raise ValueError(
                f"a reward model has a head called {HEAD!r}: got {type(model).__name__} with "
                f"{', '.join(name for name, _ in model.named_children())}"
            )
        self.model = model
        head = model.get_submodule(HEAD)
        if isinstance(head, nn.Linear) and len(list(head.parameters())) == 1:
            setattr(model, HEAD, ScoreHead(head))

    @classmethod
    def with_new_head(
        cls, path: str, *, seed: int, dtype: str = "float32", allow_new_weights: Sequence[str] = ()
    ) -> RewardModel:
        """Loads the trunk of any text model, with a random head as wide as hidden states are.

        Args:
            path, dtype, allow_new_weights: See `lightrft.models.loading.load_causal_lm`.
            seed: Fixes the head.

        Raises:
            ModelLoadError: See `load_causal_lm`; or its family has no sequence classifier.
        """
        model = load_model(
            AutoModelForSequenceClassification,
            path,
            dtype,
            (f"{HEAD}.*", *allow_new_weights),
            left_out=OTHER_HEADS,
            num_labels=1,
        )
        made = cls(model)
        weight = model.get_parameter(f"{HEAD}.weight")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # As summarize-from-feedback: first scores are of size 1.
            deviation = (weight.shape[1] + 1) ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
        return made

    @classmethod
    def from_pretrained(
        cls, path: str, *, dtype: str = "float32", allow_new_weights: Sequence[str] = ()
    ) -> RewardModel:
        """Loads a sequence classifier, or a vision-language model with a head beside it.

        Args:
            path, dtype: See `lightrft.models.loading.load_causal_lm`.
            allow_new_weights: Patterns of tensors that may stand in the file unused; none may be
                missing.

        Raises:
            ModelLoadError: It cannot be read, has more than one label, lacks a trained head, or
                its tensors do not fit.
        """
        config = load_config(path)
        if family_of(config) is not None:
            new = allow_new_weights
            return cls(VisionScorer.from_pretrained(path, dtype=dtype, allow_new_weights=new))
        if config.num_labels != 1:
            raise ModelLoadError(
                f"the reward model {path!r} must have one label: got num_labels = "
                f"{config.num_labels}; give a sequence classifier that was trained as a reward "
                "model"
            )
        # Nothing may be new: a head without training gives random rewards.
        model = load_model(
            AutoModelForSequenceClassification, path, dtype, None, left_out=allow_new_weights
        )
        return cls(model)

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        *,
        media: RowMedia | None = None,
        is_read: Tensor | None = None,
    ) -> Tensor:
        """The score at the last token of each row: [batch] float32.

        Args:
            token_ids: [batch, seq] int64, padded.
            attention_mask: [batch, seq] bool, True on real tokens; one or more in each row.
            media: Images and videos of the rows; None is text.
            is_read: [batch, seq] bool, real tokens whose scores are given instead, [batch, seq]
                and 0 elsewhere; None reads the last ones.
        """
        layout = self.lay_out(token_ids, attention_mask)
        hidden: Tensor = trunk_output(self.pretrained, layout, media).last_hidden_state
        counts = layout.is_real.cumsum(dim=1)
        is_last = layout.is_real & (counts == counts[:, -1:])
        rows, columns, places = layout.read_at(is_last if is_read is None else is_read)
        found: Tensor = self.model.get_submodule(HEAD)(hidden.flatten(0, 1)[places])
        scores = found.squeeze(-1).float()
        placed = scores.new_zeros(layout.shape).index_put((rows, columns), scores)
        return layout.join(placed.sum(dim=1) if is_read is None else placed)

    @property
    def pretrained(self) -> PreTrainedModel:
        """The trunk."""
        return self.model.base_model

    @property
    def reads_media(self) -> bool:
        """Whether rows may have images or videos."""
        return family_of(self.config) is not None

    @property
    def config(self) -> PretrainedConfig:
        """The configuration of the wrapped model."""
        return self.model.config


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

"""Reward model: one number for a whole text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from lightrft.config import BuildOptions
from lightrft.config.files import FileError, regular_file
from lightrft.engines.media.families import family_of
from lightrft.engines.media.media import RowMedia
from lightrft.models.loading import (
    SCORE_FILE,
    ModelLoadError,
    load_config,
    load_model,
    load_trunk,
    other_heads,
    save_pretrained,
)
from lightrft.models.lora import LoraModel
from lightrft.models.score_heads import (
    LAST_TOKEN,
    AttentionHead,
    ScoreHead,
    build_head,
    describe_head,
    initialise,
    pooling_of,
    score_weights,
)
from lightrft.models.sequence_model import SequenceModel, trunk_output

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HEAD = "score"
ONE_SCORE: Mapping[str, float] = {"": 1.0}


class RewardModel(SequenceModel):
    """Trunk with a head that scores token sequences.

    Args:
        model: Transformers model "for sequence classification" with its head in the child `score`
            and one label for each score; or a trunk.
        head: Head of a trunk, see `lightrft.models.score_heads`; None for a classifier.

    Raises:
        ValueError: A classifier has another number of labels, or no head `score`.
    """

    is_actor = False

    def __init__(self, model: PreTrainedModel, head: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model
        self._weights = tuple(score_weights(model.config).values())
        if head is not None:
            # Beside the trunk, whose files stay those of any checkpoint.
            self.score = head
            return
        if model.config.num_labels != len(self._weights):
            raise ValueError(
                "a reward model has one label for each score: got num_labels = "
                f"{model.config.num_labels} and {len(self._weights)} scores in "
                f"{type(model).__name__}"
            )
        head_module = dict(model.named_children()).get(HEAD)
        if head_module is None:
            raise ValueError(
                f"a reward model has a head called {HEAD!r}: got {type(model).__name__} with "
                f"{', '.join(name for name, _ in model.named_children())}"
            )
        if isinstance(head_module, nn.Linear):
            setattr(
                model, HEAD, ScoreHead(cast("nn.Parameter", head_module.weight), head_module.bias)
            )

    @classmethod
    def with_new_head(
        cls,
        path: str,
        *,
        seed: int,
        dtype: str = "float32",
        allow_new_weights: Sequence[str] = (),
        pooling: str = LAST_TOKEN,
        weights: Mapping[str, float] = ONE_SCORE,
    ) -> Self:
        """Load the trunk of any model, with a random head of the hidden states' width.

        Args:
            path, dtype, allow_new_weights: See `lightrft.models.loading.load_causal_lm`.
            seed: Seed of the head.
            pooling: Name in the registry of poolings.
            weights: Weight of each score in the reward, by name; each score has a head.

        Raises:
            ModelLoadError: As `load_causal_lm`; or its family has no sequence classifier.
        """
        if pooling == LAST_TOKEN and has_classifier(load_config(path)):
            model = load_model(
                AutoModelForSequenceClassification,
                path,
                dtype,
                (f"{HEAD}.*", *allow_new_weights),
                left_out=other_heads(path),
                num_labels=len(weights),
            )
            # transformers' token classifiers have a bias by default.
            model.config.token_classification_bias = False
            describe_head(model.config, pooling, weights)
            made = cls(model)
        else:
            trunk = load_trunk(path, dtype=dtype, allow_new_weights=allow_new_weights)
            describe_head(trunk.config, pooling, weights)
            width = trunk.config.get_text_config().hidden_size
            made = cls(trunk, build_head(pooling, width, len(weights)).to(trunk.dtype))
        initialise(made.head, seed)
        return made

    @classmethod
    def from_pretrained(
        cls, path: str, *, dtype: str = "float32", allow_new_weights: Sequence[str] = ()
    ) -> Self:
        """Load a sequence classifier, or a trunk with a head in `SCORE_FILE` beside it.

        Args:
            path, dtype: See `lightrft.models.loading.load_causal_lm`.
            allow_new_weights: Patterns of tensors in the file that may stay unused; none may be
                missing.

        Raises:
            ModelLoadError: The model cannot be read, has more labels than scores, lacks a trained
                head, or its tensors do not fit.
        """
        config = load_config(path)
        if family_of(config) is not None or (Path(path) / SCORE_FILE).is_file():
            trunk = load_trunk(path, dtype=dtype, allow_new_weights=allow_new_weights)
            return cls(trunk, load_score_head(path, trunk))
        scores = score_weights(config)
        if config.num_labels != len(scores):
            raise ModelLoadError(
                f"the reward model {path!r} must have one label: got num_labels = "
                f"{config.num_labels}; give a sequence classifier that was trained as a reward "
                "model"
            )
        # No weight may be new: an untrained head gives random rewards.
        model = load_model(
            AutoModelForSequenceClassification, path, dtype, None, left_out=allow_new_weights
        )
        return cls(model)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the files that `from_pretrained` reads, without tokenizer and processor."""
        save_pretrained(self.model, None, directory)
        if self.is_beside:
            head = {name: value.contiguous() for name, value in self.head.state_dict().items()}
            save_file(head, Path(directory) / SCORE_FILE)

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        *,
        media: RowMedia | None = None,
        is_read: Tensor | None = None,
        by_name: bool = False,
    ) -> Tensor:
        """Return the score of each row: [batch] float32.

        Args:
            token_ids: [batch, seq] int64, padded.
            attention_mask: [batch, seq] bool, True on real tokens; one or more in each row.
            media: Images and videos of the rows; None is text.
            is_read: [batch, seq] bool, real tokens to score instead, as [batch, seq] with 0
                elsewhere; None scores whole rows.
            by_name: Return all scores, [batch, scores], instead of their weighted sum.

        Raises:
            ValueError: Attention pooling cannot read single tokens, or a stream that ranks share.
        """
        layout = self.lay_out(token_ids, attention_mask, media=media)
        hidden: Tensor = trunk_output(
            self.pretrained, layout, media, family=self.family
        ).last_hidden_state
        tokens = hidden.flatten(0, 1)
        head = self.head
        if isinstance(head, AttentionHead):
            if self.sequence_group is not None or is_read is not None:
                raise ValueError(
                    "attention pooling reads whole rows on one rank: use the pooling last for "
                    "sp_size > 1 and for scores of steps"
                )
            rows, _, places = layout.read_at(layout.is_real)
            return self._joined(head(tokens[places], rows, layout.shape[0]), by_name=by_name)
        counts = layout.is_real.cumsum(dim=1)
        is_last = layout.is_real & (counts == counts[:, -1:])
        rows, columns, places = layout.read_at(is_last if is_read is None else is_read)
        scores = head(tokens[places]).float()
        shape = (*layout.shape, len(self._weights))
        placed = scores.new_zeros(shape).index_put((rows, columns), scores)
        sums = layout.join(placed.sum(dim=1) if is_read is None else placed)
        return self._joined(sums, by_name=by_name)

    def _joined(self, scores: Tensor, *, by_name: bool) -> Tensor:
        """Return scores [..., score], or their weighted sum [...]."""
        if by_name:
            return scores
        return (scores * scores.new_tensor(self._weights)).sum(dim=-1)

    @property
    def is_beside(self) -> bool:
        """Return whether the head lies beside the transformers model, not in it."""
        return HEAD in self._modules

    @property
    def head(self) -> nn.Module:
        """Head."""
        return self.score if self.is_beside else self.model.get_submodule(HEAD)

    @property
    def pretrained(self) -> PreTrainedModel:
        """Trunk."""
        return self.model if self.is_beside else self.model.base_model

    @property
    def config(self) -> PretrainedConfig:
        """Configuration of the wrapped model."""
        return self.model.config


def has_classifier(config: PretrainedConfig) -> bool:
    """Try whether transformers has a classifier of texts whose head maps one hidden state."""
    if family_of(config) is not None:
        return False
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config)
    except ValueError:  # none of this type
        return False
    return isinstance(getattr(model, HEAD, None), nn.Linear)


def load_score_head(path: str, trunk: PreTrainedModel) -> nn.Module:
    """Return the head beside a trunk.

    Raises:
        ModelLoadError: The head is missing or damaged, or of another shape.
    """
    pooling, num_scores = pooling_of(trunk.config), len(score_weights(trunk.config))
    width, file = trunk.config.get_text_config().hidden_size, Path(path) / SCORE_FILE
    head = build_head(pooling, width, num_scores).to(trunk.dtype)
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    try:
        tensors = load_file(regular_file(file))
    except (OSError, FileError, SafetensorError) as err:
        raise ModelLoadError(
            f"the reward model {path!r} has no trained head: {SCORE_FILE} with a tensor "
            f"`weight` [{num_scores}, {width}] is missing or damaged: {' '.join(str(err).split())}"
        ) from err
    if isinstance(head, ScoreHead):
        # A bias is optional: files without one are read, too.
        tensors.setdefault("bias", torch.zeros(num_scores))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != expected:
        wanted = str(expected)
        if isinstance(head, ScoreHead):
            wanted = f"one tensor `weight` of shape {expected['weight']}, and maybe a `bias`"
        raise ModelLoadError(f"{file} holds {shapes}: expected {wanted}")
    head.load_state_dict(tensors)
    return head


class LoraRewardModel(LoraModel, RewardModel):
    """Reward model with adapters, whose head is trained whole; see `LoraModel`."""

    def __init__(
        self, model: PreTrainedModel, config: BuildOptions, head: nn.Module | None = None
    ) -> None:
        super().__init__(model, head)
        self.whole = () if self.is_beside else (HEAD,)
        self.add_adapters(model, config)
        self.head.requires_grad_(True)

"""Family of models that read media in one way, from the table or from the model itself."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.engines.media.media import MediumKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin

TensorsByName = dict[str, Tensor]
Inputs = Mapping[str, Tensor]
# Widths and heights of images.
Sizes = Sequence[tuple[int, int]]
# Input with the sizes of the media whose patches another input holds.
GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
# What a processor knows of images from their widths and heights alone, in the form that its
# `replace_image_token` takes; None if its settings depend on pixels.
Facts = Mapping[str, Sequence[object]]
SizeFacts = Callable[["ProcessorMixin", Sizes], Facts | None]
# Number of features of a prompt's tensors, which has media, and so of its placeholders.
CountFeatures = Callable[["ProcessorMixin", Inputs], int]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """Family of models that read media in one way.

    Args:
        model_type: Model type in its configuration.
        token_types: Input with the kind of each token; None if the model has none.
        takes_types: Whether the forward pass reads it; otherwise only positions depend on it.
        has_blocks: Whether tokens of an image see each other in both directions in all layers.
        has_axes: Whether positions have the three axes time, height and width.
        kinds: Input with the pixels of each kind of media that it reads.
        reads: Media that prompts may have.
        attends_to_images: Whether layers attend from text to images, instead of images lying
            between the tokens. Then sequences packed into one stream cannot be separated.
        token_axis: Inputs with one entry for each token of the prompt, after the row. Responses
            have 0, or repeat the last one if the family attends to images.
        marks: Attribute of the processor with the placeholder of a chat template, by kind.
        soft_marks: Further placeholders, by their names among the tokenizer's special tokens.
        num_features: Function that counts features; None if they cannot be counted.
        size_facts: Function from the sizes of images to the facts that fix a prompt's tokens.
        features: Function from the trunk and the inputs of a kind to features; None for the
            trunk's built-in method.
        inputs: Arguments of the trunk, which takes no others; None if the processor gives no more.
        places: Tokens that stand for a feature; () for those that the processor names.
    """

    model_type: str
    token_types: str | None = None
    takes_types: bool = False
    has_blocks: bool = False
    has_axes: bool = False
    kinds: Mapping[MediumKind, str] = field(default_factory=lambda: {"image": "pixel_values"})
    reads: frozenset[MediumKind] = frozenset({"image"})
    attends_to_images: bool = False
    token_axis: tuple[str, ...] = ()
    marks: Mapping[MediumKind, str] = field(
        default_factory=lambda: {"image": "image_token", "video": "video_token"}
    )
    soft_marks: tuple[str, ...] = ()
    num_features: CountFeatures | None = None
    size_facts: SizeFacts | None = None
    features: "Callable[[PreTrainedModel, Inputs], Tensor] | None" = None
    inputs: frozenset[str] | None = None
    places: tuple[int, ...] = ()

    def join(self, axis: int, tensors: Sequence[Tensor | None]) -> Tensor:
        """Join one input of the rows of a batch, in order; None for rows without media.

        Other axes are padded with zeros to the largest. A family that attends to images has one
        entry for each row, which is zero for rows without media.

        Args:
            axis: Axis along which the input grows with the number of media.
            tensors: Input of each row.
        """
        present = [tensor for tensor in tensors if tensor is not None]
        size = [max(sizes) for sizes in zip(*(t.shape for t in present), strict=True)]
        if self.attends_to_images:
            empty = present[0].new_zeros((1, *size[1:]))
            return torch.cat([empty if t is None else _fit(t, size) for t in tensors])
        sizes = ([*size[:axis], t.shape[axis], *size[axis + 1 :]] for t in present)
        return torch.cat([_fit(*each) for each in zip(present, sizes, strict=True)], dim=axis)

    def joined(self, parts: Sequence[Inputs], axes: Mapping[str, int]) -> Inputs:
        """Return the inputs of parts of a row, by the axis along which each grows.

        Args:
            parts: Inputs of each part, in order.
            axes: Axis by name; 0 for missing names.
        """
        if len(parts) == 1:  # without a copy
            return parts[0]
        names = dict.fromkeys(name for tensors in parts for name in tensors)
        return {
            name: self.join(axes.get(name, 0), [tensors.get(name) for tensors in parts])
            for name in names
        }

    def split(self, tensors: Inputs, counts: Sequence[int]) -> list[TensorsByName]:
        """Split the inputs of one processor call by prompt.

        Args:
            tensors: Inputs of media of one kind.
            counts: Number of media of each prompt.

        Returns:
            Inputs of each prompt; [] if the inputs cannot be split.
        """
        parts: list[TensorsByName] = [{} for _ in counts]
        for name, tensor in tensors.items():
            grid = tensors.get(GRIDS.get(name, ""))
            # Entries of each medium.
            sizes = torch.ones(sum(counts)) if grid is None else grid.prod(-1)
            if int(sizes.sum()) != len(tensor):
                return []
            of_prompts = torch.split(sizes, list(counts))
            shares = torch.split(tensor, [int(share.sum()) for share in of_prompts])
            for part, share in zip(parts, shares, strict=True):
                part[name] = share
        return parts


def _fit(tensor: Tensor, size: Sequence[int]) -> Tensor:
    """Append zeros to each axis, up to `size`."""
    missing = [want - have for want, have in zip(size, tensor.shape, strict=True)]
    return F.pad(tensor, [n for extra in reversed(missing) for n in (0, extra)])


def derived_family(config: "PretrainedConfig") -> VisionFamily:
    """Return the family that a model's class and configuration describe; images are all it reads.

    A proof at load decides whether they describe it well. A class whose trunk takes no pixels, or
    whose configuration names no placeholder, gives a family that reads nothing.
    """
    place = next((i for n in _PLACES if (i := getattr(config, n, None)) is not None), None)
    return _family_of_class(cast("Hashable", type(config)), config.model_type, place)


# Fields with the token that stands for a feature of an image.
_PLACES = ("image_token_id", "image_token_index")
# Inputs with the kind of each token.
_TYPES = ("mm_token_type_ids", "token_type_ids")


@cache
def _family_of_class(config_class: Hashable, model_type: str, place: int | None) -> VisionFamily:
    from transformers import AutoModel

    trunk = AutoModel._model_mapping.get(config_class, None)
    inputs = frozenset(inspect.signature(trunk.forward).parameters) if trunk else frozenset()
    if place is None or "pixel_values" not in inputs or not hasattr(trunk, "get_image_features"):
        return VisionFamily(model_type, kinds={}, reads=frozenset())
    types = next((name for name in _TYPES if name in inputs), None)
    has_axes = hasattr(trunk, "get_rope_index")
    of_tokens = sorted(name for name in inputs - {types} if name.endswith("token_type_ids"))
    return VisionFamily(
        model_type,
        token_types=types,
        takes_types=types is not None and not has_axes,
        has_axes=has_axes,
        token_axis=tuple(of_tokens),
        inputs=inputs,
        places=(place,),
    )

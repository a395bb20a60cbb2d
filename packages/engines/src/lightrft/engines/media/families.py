"""Families of models that read media as one table: what their classes do not say."""

import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrft.engines.libraries import check_library
from lightrft.engines.media.media import MediumKind

if TYPE_CHECKING:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        PretrainedConfig,
        PreTrainedModel,
        ProcessorMixin,
    )


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


_PICTURES = frozenset[MediumKind]({"image", "video"})


def _patch_features(processor: "ProcessorMixin", tensors: Inputs) -> int:
    grids = [tensors[name] for name in GRIDS.values() if name in tensors]
    patches = sum(int(grid.prod(-1).sum()) for grid in grids)
    return patches // int(processor.image_processor.merge_size) ** 2


def _patches(processor: "ProcessorMixin", sizes: Sizes):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """Return each image's patches by the image processor: a number, or also rows and columns."""
    count = processor.image_processor.get_number_of_image_patches
    return [count(height, width, {}) for width, height in sizes]


def _blank(size: Mapping[str, int]) -> Tensor:
    """Return a picture of zeros that takes no memory for its pixels."""
    return torch.zeros(()).expand(3, size["height"], size["width"])


def _patch_facts(processor: "ProcessorMixin", sizes: Sizes) -> Facts:
    return {"image_grid_thw": [torch.tensor([each]) for each in _patches(processor, sizes)]}


def _tile_facts(processor: "ProcessorMixin", sizes: Sizes) -> Facts:
    return {"num_patches": _patches(processor, sizes)}


def _split_facts(processor: "ProcessorMixin", sizes: Sizes) -> Facts:
    patches = _patches(processor, sizes)
    return {"rows": [[rows for _, rows, _ in patches]], "cols": [[cols for _, _, cols in patches]]}


def _gemma_facts(processor: "ProcessorMixin", sizes: Sizes) -> Facts | None:
    is_cut = processor.image_processor.do_pan_and_scan
    return None if is_cut else {"num_crops": [0] * len(sizes)}


def _llava_facts(processor: "ProcessorMixin", sizes: Sizes) -> Facts | None:
    images = processor.image_processor
    if not images.do_center_crop:
        return None
    return {"pixel_values": [_blank(images.crop_size)] * len(sizes)}


def _onevision_facts(processor: "ProcessorMixin", sizes: Sizes) -> Facts:
    return {
        "batch_num_images": [len(sizes)],
        "image_sizes": [[height, width] for width, height in sizes],
        "pixel_values": [[_blank(processor.image_processor.size)]],
    }


def _tile_features(axis: int, length: str) -> CountFeatures:
    """Return a counter of features: tiles along an axis of the pixels, times `length` each."""
    return lambda processor, tensors: (
        tensors["pixel_values"].shape[axis] * int(vars(processor)[length])
    )


def _llava_features(processor: "ProcessorMixin", tensors: Inputs) -> int:
    settings = vars(processor)
    count, _, height, width = tensors["pixel_values"].shape
    side = int(settings["patch_size"])
    is_cut = settings["vision_feature_select_strategy"] == "default"
    added = int(settings["num_additional_image_tokens"]) - int(is_cut)
    return count * ((height // side) * (width // side) + added)


def _onevision_features(processor: "ProcessorMixin", tensors: Inputs) -> int:
    check_library("transformers", "a picture of Llava-Next or Llava-OneVision")
    num_tokens, count = int(vars(processor)["num_image_tokens"]), 0
    if "pixel_values" in tensors:
        side = tensors["pixel_values"].shape[-1]
        sizes = tensors["image_sizes"].tolist()
        count = len(sizes) * (num_tokens + 1)
        if len(sizes) == 1:
            (height, width) = sizes[0]
            count = int(processor._get_number_of_features(height, width, side, side))
        if vars(processor)["vision_feature_select_strategy"] == "default":
            count -= len(sizes)
    if "pixel_values_videos" in tensors:
        videos, frames = tensors["pixel_values_videos"].shape[:2]
        count += videos * (frames * math.ceil(math.isqrt(num_tokens) / 2) ** 2 + 1)
    return count


def _heard(trunk: "PreTrainedModel", inputs: Inputs) -> Tensor:
    states = trunk.audio_tower(inputs["input_features"]).last_hidden_state
    features: Tensor = trunk.multi_modal_projector(states)
    return features


def _mel_features(processor: "ProcessorMixin", tensors: Inputs) -> int:
    # A convolution and then a pooling halve the length of each sound.
    lengths = (tensors["feature_attention_mask"].sum(-1) - 1) // 2 + 1
    return int(((lengths - 2) // 2 + 1).sum())


def _next_features(processor: "ProcessorMixin", tensors: Inputs) -> int:
    check_library("transformers", "a picture of Llava-Next or Llava-OneVision")
    height, width = tensors["pixel_values"].shape[-2:]
    is_cut = vars(processor)["vision_feature_select_strategy"] == "default"
    return sum(
        int(processor._get_number_of_features(*size, height, width)) - int(is_cut)
        for size in tensors["image_sizes"].tolist()
    )


def _next_facts(processor: "ProcessorMixin", sizes: Sizes) -> Facts:
    return {
        "image_sizes": [[height, width] for width, height in sizes],
        "pixel_values": [[_blank(processor.image_processor.crop_size)]],
    }


def _sized_features(processor: "ProcessorMixin", tensors: Inputs) -> int:
    settings = vars(processor)
    side = int(settings["patch_size"]) * int(settings["spatial_merge_size"])
    return int((tensors["image_sizes"] // side).prod(-1).sum())


def _sized_facts(processor: "ProcessorMixin", sizes: Sizes) -> Facts:
    check_library("transformers", "a picture of Mistral 3")
    from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

    settings = vars(processor)
    side = int(settings["patch_size"]) * int(settings["spatial_merge_size"])
    longest = int(processor.image_processor.size["longest_edge"])
    pictures = [torch.zeros(()).expand(3, height, width) for width, height in sizes]
    return {"image_sizes": [get_resize_output_image_size(p, longest, side) for p in pictures]}


def _qwen(model_type: str, reads: frozenset[MediumKind] = _PICTURES) -> VisionFamily:
    pixels: Mapping[MediumKind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
    return VisionFamily(
        model_type,
        token_types="mm_token_type_ids",
        has_axes=True,
        kinds={kind: pixels[kind] for kind in sorted(reads)},
        reads=reads,
        num_features=_patch_features,
        size_facts=_patch_facts,
    )


def _split(model_type: str) -> VisionFamily:
    return VisionFamily(
        model_type,
        num_features=_tile_features(1, "image_seq_len"),
        size_facts=_split_facts,
    )


_FAMILIES = (
    _qwen("qwen2_vl"),
    _qwen("qwen2_5_vl"),
    _qwen("qwen3_vl"),
    _qwen("qwen3_vl_moe"),
    _qwen("qwen3_5"),
    _qwen("qwen3_5_moe"),
    # Its images and frames share a placeholder: the model cannot compute both in one pass.
    _qwen("glm4v", reads=frozenset({"image"})),
    VisionFamily(
        "gemma3",
        token_types="token_type_ids",
        takes_types=True,
        has_blocks=True,
        marks={"image": "boi_token"},
        soft_marks=("image_token",),
        num_features=_tile_features(0, "image_seq_length"),
        size_facts=_gemma_facts,
    ),
    # Frames of a video are images to it.
    VisionFamily(
        "internvl",
        reads=_PICTURES,
        num_features=_tile_features(0, "image_seq_length"),
        size_facts=_tile_facts,
    ),
    VisionFamily("llava", num_features=_llava_features, size_facts=_llava_facts),
    VisionFamily(
        "llava_onevision",
        kinds={"image": "pixel_values", "video": "pixel_values_videos"},
        reads=_PICTURES,
        num_features=_onevision_features,
        size_facts=_onevision_facts,
    ),
    VisionFamily("llava_next", num_features=_next_features, size_facts=_next_facts),
    VisionFamily("mistral3", num_features=_sized_features, size_facts=_sized_facts),
    _split("smolvlm"),
    _split("idefics3"),
    VisionFamily(
        "mllama",
        attends_to_images=True,
        token_axis=("cross_attention_mask",),
        num_features=lambda processor, tensors: tensors["pixel_values"].shape[1],
    ),
    VisionFamily(
        "qwen2_audio",
        kinds={"audio": "input_features"},
        reads=frozenset({"audio"}),
        marks={"audio": "audio_token"},
        num_features=_mel_features,
        features=_heard,
    ),
)
FAMILIES: Mapping[str, VisionFamily] = {family.model_type: family for family in _FAMILIES}
_OMNI = "its checkpoint holds models that speak, which are not trained: give its thinker"
# Reasons why some requested families are not supported, text rows included.
_REFUSED = {
    "qwen2_5_omni": _OMNI,
    "qwen3_omni_moe": _OMNI,
}
_OF_MEDIA = ("vision_config", "audio_config")
# Beginnings of the fields of a configuration that name placeholders: boi begins an image.
_MARKED = ("image", "video", "audio", "vision", "boi", "eoi", "boa", "eoa")


def family_of(config: "PretrainedConfig") -> VisionFamily | None:
    """Return the family of a model; None for text models.

    A model with a tower and without a row has the family that its class describes.

    Raises:
        ValueError: Its text cannot be trained, either.
    """
    name = config.model_type
    if name in _REFUSED:
        raise ValueError(
            f"vision-language models of type {name!r} are not supported ({_REFUSED[name]}): "
            f"expected one of {', '.join(FAMILIES)}"
        )
    has_towers = any(getattr(config, part, None) is not None for part in _OF_MEDIA)
    return FAMILIES.get(name) or (derived_family(config) if has_towers else None)


def language_model_class(
    config: "PretrainedConfig",
) -> "type[AutoModelForCausalLM | AutoModelForMultimodalLM]":
    """Return the class of transformers that reads a language model, with its towers if it has any.

    The other class would read a vision-language model under other names.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    family, kind = family_of(config), type(config)
    is_known = kind in AutoModelForMultimodalLM._model_mapping
    # Some classes of text are in the table of models with towers alone.
    is_text = family is None and kind in AutoModelForCausalLM._model_mapping
    has_towers = (family is not None and family.reads) or (is_known and not is_text)
    return AutoModelForMultimodalLM if has_towers else AutoModelForCausalLM  # type: ignore[no-any-return]


def reads_media(config: "PretrainedConfig") -> bool:
    """Return whether rows of a model may have media, as far as its class and configuration say."""
    family = family_of(config)
    return family is not None and bool(family.reads)


def has_row(config: "PretrainedConfig") -> bool:
    """Return whether the table names a model's type, so that its rows are taken to have media."""
    return config.model_type in FAMILIES


def placeholder_ids(config: "PretrainedConfig") -> tuple[int, ...]:
    """Return the tokens that stand for media, which a policy must never sample.

    Args:
        config: Configuration, whose fields such as `image_token_id` and `boi_token_index` name
            them. A model that reads no media has none: there such a field may name a word.
    """
    if not reads_media(config):
        return ()
    token_ids = {
        value
        for name, value in config.to_dict().items()
        if name.endswith(("_token_id", "_token_index"))
        and name.startswith(_MARKED)
        and isinstance(value, int)
    }
    vocabulary = config.get_text_config().vocab_size
    return tuple(sorted(token for token in token_ids if 0 <= token < vocabulary))


def language_model(trunk: nn.Module) -> nn.Module:
    """Return the part of a vision-language trunk that reads embeddings."""
    for name in ("language_model", "text_model"):
        part = getattr(trunk, name, None)
        if isinstance(part, nn.Module):
            return part
    return trunk

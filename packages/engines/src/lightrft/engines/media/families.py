"""Families of models that read media as one table: their inputs, towers and dummies."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

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


_PICTURES = frozenset[MediumKind]({"image", "video"})


# How tensors of several prompts become one:
#   "items"  joined along axis 0: patches, grids, images, tiles, one entry for each medium
#   "tiled"  [media, tiles, ...] padded to the most tiles, then joined along axis 0
#   "stream" [1, tiles, ...] joined along axis 1
#   "rows"   [1, media, ...] padded to the largest of each axis; rows without media are zeros
Join = Literal["items", "tiled", "stream", "rows"]
TensorsByName = dict[str, Tensor]
Inputs = Mapping[str, Tensor]
# Widths and heights of images.
Sizes = Sequence[tuple[int, int]]
# Input with the sizes of the media whose patches another input holds.
_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
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
        joins: Rule for joining each input of the model over prompts.
        dummy: Function that makes inputs of a smallest medium of a kind from a configuration.
        token_types: Input with the kind of each token; None if the model has none.
        takes_types: Whether the forward pass reads it; otherwise only positions depend on it.
        has_axes: Whether positions have the three axes time, height and width.
        kinds: Input with the pixels of each kind of media that it reads.
        towers: Modules that read pixels or sounds.
        reads: Media that prompts may have.
        attends_to_images: Whether layers attend from text to images, instead of images lying
            between the tokens. Then sequences packed into one stream cannot be separated.
        token_axis: Inputs with one entry for each token of the prompt, after the row; responses
            repeat the last one.
        marks: Attribute of the processor with the placeholder of a chat template, by kind.
        soft_marks: Further placeholders, by their names among the tokenizer's special tokens.
        num_features: Function that counts features; None if they cannot be counted.
        size_facts: Function from the sizes of images to the facts that fix a prompt's tokens.
        features: Function from the trunk and the inputs of a kind to features; None for the
            trunk's built-in method.
    """

    model_type: str
    joins: Mapping[str, Join]
    dummy: "Callable[[PretrainedConfig, MediumKind], TensorsByName]"
    token_types: str | None = None
    takes_types: bool = False
    has_axes: bool = False
    kinds: Mapping[MediumKind, str] = field(default_factory=lambda: {"image": "pixel_values"})
    towers: tuple[str, ...] = ("vision_tower",)
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

    def join(self, name: str, tensors: Sequence[Tensor | None]) -> Tensor:
        """Join one input of the rows of a batch, in order; None for rows without media.

        Raises:
            ValueError: The input is not known for this family.
        """
        if name not in self.joins:
            raise ValueError(
                f"the processor of {self.model_type} gave an input that is not known: {name!r}; "
                f"expected {', '.join(self.joins)}"
            )
        present = [tensor for tensor in tensors if tensor is not None]
        kind = self.joins[name]
        if kind == "items":
            return torch.cat(present)
        if kind == "stream":
            return torch.cat([_fit(t, _largest(present)[2:], 2) for t in present], dim=1)
        if kind == "tiled":
            return torch.cat([_fit(t, _largest(present)[1:], 1) for t in present])
        size = _largest(present)
        empty = present[0].new_zeros((1, *size[1:]))
        return torch.cat([empty if t is None else _fit(t, size[1:], 1) for t in tensors])

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
            grid = tensors.get(_GRIDS.get(name, ""))
            # Entries of each medium.
            sizes = torch.ones(sum(counts)) if grid is None else grid.prod(-1)
            if self.joins.get(name) != "items" or int(sizes.sum()) != len(tensor):
                return []
            of_prompts = torch.split(sizes, list(counts))
            shares = torch.split(tensor, [int(share.sum()) for share in of_prompts])
            for part, share in zip(parts, shares, strict=True):
                part[name] = share
        return parts


def _largest(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True))


def _fit(tensor: Tensor, size: Sequence[int], start: int) -> Tensor:
    """Append zeros to each axis from `start` on, up to `size`."""
    missing = [want - have for want, have in zip(size, tensor.shape[start:], strict=True)]
    return F.pad(tensor, [n for extra in reversed(missing) for n in (0, extra)])


def _qwen_dummy(config: "PretrainedConfig", kind: MediumKind) -> TensorsByName:
    vision = config.vision_config
    merge = int(vision.spatial_merge_size)
    width = int(vision.in_channels) * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
    grid = torch.tensor([[1, merge, merge]])
    pixels = torch.zeros(merge * merge, width)
    if kind == "video":
        return {"pixel_values_videos": pixels, "video_grid_thw": grid}
    return {"pixel_values": pixels, "image_grid_thw": grid}


def _image_size(config: "PretrainedConfig") -> tuple[int, int]:
    size = config.vision_config.image_size
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _image_dummy(config: "PretrainedConfig", kind: MediumKind) -> TensorsByName:
    return {"pixel_values": torch.zeros(1, 3, *_image_size(config))}


def _tiled_dummy(config: "PretrainedConfig", kind: MediumKind) -> TensorsByName:
    height, width = _image_size(config)
    if kind == "video":
        return {"pixel_values_videos": torch.zeros(1, 1, 3, height, width)}
    check_library("transformers", "a picture of Llava-Next or Llava-OneVision")
    from transformers.models.llava_onevision.modeling_llava_onevision import (
        image_size_to_num_patches,
    )

    tiles = image_size_to_num_patches((height, width), config.image_grid_pinpoints, height)
    return {
        "pixel_values": torch.zeros(1, tiles, 3, height, width),
        "image_sizes": torch.tensor([[height, width]]),
        "batch_num_images": torch.tensor([1]),
    }


def _stream_dummy(config: "PretrainedConfig", kind: MediumKind) -> TensorsByName:
    size = (1, 1, *_image_size(config))
    # Tiles of zeros are left out as padding.
    return {
        "pixel_values": torch.ones(1, 1, 3, *size[2:]),
        "pixel_attention_mask": torch.ones(size, dtype=torch.int64),
    }


def _cross_dummy(config: "PretrainedConfig", kind: MediumKind) -> TensorsByName:
    tiles = int(config.vision_config.max_num_tiles)
    mask = torch.zeros(1, 1, tiles, dtype=torch.int64)
    mask[..., 0] = 1
    return {
        "pixel_values": torch.zeros(1, 1, tiles, 3, *_image_size(config)),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.int64),
        "aspect_ratio_mask": mask,
        "cross_attention_mask": torch.zeros(1, 1, 1, tiles, dtype=torch.int64),
    }


def _patch_features(processor: "ProcessorMixin", tensors: Inputs) -> int:
    grids = [tensors[name] for name in _GRIDS.values() if name in tensors]
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


def _mel_dummy(config: "PretrainedConfig", kind: MediumKind) -> TensorsByName:
    audio = config.audio_config
    # One of two convolutions halves the length.
    length = 2 * int(audio.max_source_positions)
    return {
        "input_features": torch.zeros(1, int(audio.num_mel_bins), length),
        "feature_attention_mask": torch.ones(1, length, dtype=torch.int64),
    }


def _heard(trunk: "PreTrainedModel", inputs: Inputs) -> Tensor:
    states = trunk.audio_tower(inputs["input_features"]).last_hidden_state
    features: Tensor = trunk.multi_modal_projector(states)
    return features


def _mel_features(processor: "ProcessorMixin", tensors: Inputs) -> int:
    # A convolution and then a pooling halve the length of each sound.
    lengths = (tensors["feature_attention_mask"].sum(-1) - 1) // 2 + 1
    return int(((lengths - 2) // 2 + 1).sum())


def _next_dummy(config: "PretrainedConfig", kind: MediumKind) -> TensorsByName:
    inputs = _tiled_dummy(config, kind)
    return {name: inputs[name] for name in ("pixel_values", "image_sizes")}


def _next_features(processor: "ProcessorMixin", tensors: Inputs) -> int:
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


def _sized_dummy(config: "PretrainedConfig", kind: MediumKind) -> TensorsByName:
    side = int(config.vision_config.patch_size) * int(config.spatial_merge_size)
    return {
        # transformers loses the axis of a single feature.
        "pixel_values": torch.zeros(1, 3, side, 2 * side),
        "image_sizes": torch.tensor([[side, 2 * side]]),
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


def _qwen(model_type: str, *times: str, reads: frozenset[MediumKind] = _PICTURES) -> VisionFamily:
    pixels: Mapping[MediumKind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
    names = (*pixels.values(), *_GRIDS.values())
    return VisionFamily(
        model_type,
        dict.fromkeys((*names, *times), "items"),
        _qwen_dummy,
        token_types="mm_token_type_ids",
        has_axes=True,
        kinds={kind: pixels[kind] for kind in sorted(reads)},
        reads=reads,
        towers=("visual",),
        num_features=_patch_features,
        size_facts=_patch_facts,
    )


def _split(model_type: str) -> VisionFamily:
    return VisionFamily(
        model_type,
        {"pixel_values": "stream", "pixel_attention_mask": "stream"},
        _stream_dummy,
        towers=("vision_model",),
        num_features=_tile_features(1, "image_seq_len"),
        size_facts=_split_facts,
    )


_FAMILIES = (
    _qwen("qwen2_vl"),
    _qwen("qwen2_5_vl", "second_per_grid_ts"),
    _qwen("qwen3_vl"),
    _qwen("qwen3_vl_moe"),
    _qwen("qwen3_5"),
    # Its images and frames share a placeholder: the model cannot compute both in one pass.
    _qwen("glm4v", reads=frozenset({"image"})),
    VisionFamily(
        "gemma3",
        {"pixel_values": "items"},
        _image_dummy,
        token_types="token_type_ids",
        takes_types=True,
        marks={"image": "boi_token"},
        soft_marks=("image_token",),
        num_features=_tile_features(0, "image_seq_length"),
        size_facts=_gemma_facts,
    ),
    # Frames of a video are images to it.
    VisionFamily(
        "internvl",
        {"pixel_values": "items"},
        _image_dummy,
        reads=_PICTURES,
        num_features=_tile_features(0, "image_seq_length"),
        size_facts=_tile_facts,
    ),
    VisionFamily(
        "llava",
        {"pixel_values": "items"},
        _image_dummy,
        num_features=_llava_features,
        size_facts=_llava_facts,
    ),
    VisionFamily(
        "llava_onevision",
        {
            "pixel_values": "tiled",
            "image_sizes": "items",
            "batch_num_images": "items",
            "pixel_values_videos": "tiled",
            "image_sizes_videos": "items",
        },
        _tiled_dummy,
        kinds={"image": "pixel_values", "video": "pixel_values_videos"},
        reads=_PICTURES,
        num_features=_onevision_features,
        size_facts=_onevision_facts,
    ),
    VisionFamily(
        "llava_next",
        {"pixel_values": "tiled", "image_sizes": "items"},
        _next_dummy,
        num_features=_next_features,
        size_facts=_next_facts,
    ),
    VisionFamily(
        "mistral3",
        {"pixel_values": "tiled", "image_sizes": "items"},
        _sized_dummy,
        num_features=_sized_features,
        size_facts=_sized_facts,
    ),
    _split("smolvlm"),
    _split("idefics3"),
    VisionFamily(
        "mllama",
        {
            "pixel_values": "rows",
            "aspect_ratio_ids": "rows",
            "aspect_ratio_mask": "rows",
            "cross_attention_mask": "rows",
        },
        _cross_dummy,
        towers=("vision_model",),
        attends_to_images=True,
        token_axis=("cross_attention_mask",),
        num_features=lambda processor, tensors: tensors["pixel_values"].shape[1],
    ),
    VisionFamily(
        "qwen2_audio",
        {"input_features": "items", "feature_attention_mask": "items"},
        _mel_dummy,
        kinds={"audio": "input_features"},
        towers=("audio_tower",),
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
    "paligemma": "its prompts see themselves in both directions, text included",
    "qwen2_5_omni": _OMNI,
    "qwen3_omni_moe": _OMNI,
}
_OF_MEDIA = ("vision_config", "audio_config")


def family_of(config: "PretrainedConfig") -> VisionFamily | None:
    """Return the family of a model; None for text models.

    A model with a tower whose family is not known has one that reads no media: its text is trained.

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
    return FAMILIES.get(name) or (_text_of(name) if has_towers else None)


def _text_of(model_type: str) -> VisionFamily:
    """Return a family of models with towers, whose inputs are not known."""

    def no_dummy(config: "PretrainedConfig", kind: MediumKind) -> TensorsByName:
        raise ValueError(f"models of type {model_type!r} read no media here")

    return VisionFamily(model_type, {}, no_dummy, kinds={}, towers=(), reads=frozenset())


def language_model_class(
    config: "PretrainedConfig",
) -> "type[AutoModelForCausalLM | AutoModelForMultimodalLM]":
    """Return the class of transformers that reads a language model, with its towers if it has any.

    The other class would read a vision-language model under other names.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    family = family_of(config)
    has_towers = family is not None and (
        family.reads or type(config) in AutoModelForMultimodalLM._model_mapping
    )
    return AutoModelForMultimodalLM if has_towers else AutoModelForCausalLM  # type: ignore[no-any-return]


def reads_media(config: "PretrainedConfig") -> bool:
    """Return whether rows of a model may have media; towers of unknown families read none."""
    family = family_of(config)
    return family is not None and bool(family.reads)


def placeholder_ids(config: "PretrainedConfig") -> tuple[int, ...]:
    """Return the tokens that stand for media, which a policy must never sample.

    Args:
        config: Configuration, whose fields such as `image_token_id` and `boi_token_index` name
            them. A model that reads no media has none: in unknown families such a field may name
            a word.
    """
    if not reads_media(config):
        return ()
    kept = {"bos", "eos", "pad", "decoder_start", "sep", "unk"}
    token_ids = {
        value
        for name, value in config.to_dict().items()
        if name.endswith(("_token_id", "_token_index"))
        and name.rsplit("_token_", 1)[0] not in kept
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

"""Families of models that read media as one table: what their classes do not say."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.engines.libraries import check_library
from lightrft.engines.media.family import (
    GRIDS,
    CountFeatures,
    Facts,
    Inputs,
    Sizes,
    VisionFamily,
    derived_family,
)
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

"""Families of vision-language models as one table: their inputs, towers and dummies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.engines.media.media import MediumKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_PICTURES = frozenset[MediumKind]({"image", "video"})


def _images_alone() -> Mapping[MediumKind, str]:
    return {"image": "pixel_values"}


# How tensors of several prompts become one:
#   "items"  joined along axis 0: patches, grids, images, tiles, one entry for each medium
#   "tiled"  [media, tiles, ...] padded to the most tiles, then joined along axis 0
#   "stream" [1, tiles, ...] joined along axis 1
#   "rows"   [1, media, ...] padded to the largest of each axis; rows without media are zeros
Join = Literal["items", "tiled", "stream", "rows"]
TensorsByName = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One family.

    Args:
        model_type: Of its configuration.
        joins: How each input of the model is joined over prompts.
        dummy: Inputs of a smallest medium of a kind, from the model's configuration.
        token_types: Input with the kind of each token; None if the model has none.
        takes_types: Whether the forward pass reads it; else only the positions do.
        has_axes: Whether positions have the three axes time, height and width.
        kinds: Media it reads, and the input that holds the pixels of each.
        towers: Modules that see pixels.
        reads: Media that prompts may have.
        attends_to_images: Whether layers attend from text to images, instead of images lying
            between the tokens; sequences of one stream cannot be kept apart then.
        token_axis: Inputs with one entry for each token of the prompt, after the row; responses
            repeat the last one.
        image_mark: Attribute of the processor with what a chat template writes for an image.
    """

    model_type: str
    joins: Mapping[str, Join]
    dummy: "Callable[[PretrainedConfig, MediumKind], TensorsByName]"
    token_types: str | None = None
    takes_types: bool = False
    has_axes: bool = False
    kinds: Mapping[MediumKind, str] = field(default_factory=_images_alone)
    towers: tuple[str, ...] = ("vision_tower",)
    reads: frozenset[MediumKind] = frozenset({"image"})
    attends_to_images: bool = False
    token_axis: tuple[str, ...] = ()
    image_mark: str = "image_token"

    def join(self, name: str, tensors: Sequence[Tensor | None]) -> Tensor:
        """One input of a batch from those of its rows, in order; None for rows without media.

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


def _largest(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True))


def _fit(tensor: Tensor, size: Sequence[int], start: int) -> Tensor:
    """Zeros after the entries of each axis from `start` on, up to `size`."""
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


def _qwen(model_type: str, *times: str) -> VisionFamily:
    names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    return VisionFamily(
        model_type,
        dict.fromkeys((*names, *times), "items"),
        _qwen_dummy,
        token_types="mm_token_type_ids",
        has_axes=True,
        kinds={"image": "pixel_values", "video": "pixel_values_videos"},
        reads=_PICTURES,
        towers=("visual",),
    )


_FAMILIES = (
    _qwen("qwen2_vl"),
    _qwen("qwen2_5_vl", "second_per_grid_ts"),
    _qwen("qwen3_vl"),
    VisionFamily(
        "gemma3",
        {"pixel_values": "items"},
        _image_dummy,
        token_types="token_type_ids",
        takes_types=True,
        image_mark="boi_token",
    ),
    # Frames of a video are images to it.
    VisionFamily("internvl", {"pixel_values": "items"}, _image_dummy, reads=_PICTURES),
    VisionFamily("llava", {"pixel_values": "items"}, _image_dummy),
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
    ),
    VisionFamily(
        "smolvlm",
        {"pixel_values": "stream", "pixel_attention_mask": "stream"},
        _stream_dummy,
        towers=("vision_model",),
    ),
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
    ),
)
FAMILIES: Mapping[str, VisionFamily] = {family.model_type: family for family in _FAMILIES}


def family_of(config: "PretrainedConfig") -> VisionFamily | None:
    """The family of a model; None for models of text.

    Raises:
        ValueError: The model reads media and its family is not known.
    """
    family = FAMILIES.get(config.model_type)
    if family is None and getattr(config, "vision_config", None) is not None:
        raise ValueError(
            f"vision-language models of type {config.model_type!r} are not supported: expected "
            f"one of {', '.join(FAMILIES)}"
        )
    return family


def placeholder_ids(config: "PretrainedConfig") -> tuple[int, ...]:
    """Tokens that stand for media, which a policy must never sample.

    Args:
        config: Of a vision-language model; its fields `image_token_id`, `boi_token_index` and
            the like name them.
    """
    kept = {"bos", "eos", "pad", "decoder_start", "sep", "unk"}
    found = {
        value
        for name, value in config.to_dict().items()
        if name.endswith(("_token_id", "_token_index"))
        and name.rsplit("_token_", 1)[0] not in kept
        and isinstance(value, int)
    }
    vocabulary = config.get_text_config().vocab_size
    return tuple(sorted(token for token in found if 0 <= token < vocabulary))

"""Pairing prompts with their images and videos."""

import re
from collections.abc import Mapping, Sequence

IMAGE_PLACEHOLDER = re.compile(r"<\|vision_start\|>(?:<\|image_pad\|>)+<\|vision_end\|>")
VIDEO_PLACEHOLDER = re.compile(r"<\|vision_start\|>(?:<\|video_pad\|>)+<\|vision_end\|>")
Media = Sequence[object]


def has_media(media: Media | None) -> bool:
    """Whether anything but None is in a flat or nested list."""
    if media is None:
        return False
    return any(inner is not None for item in media for inner in _as_group(item))


def _as_group(item: object) -> Media:
    return item if isinstance(item, list | tuple) else [item]


def _grouped(
    media: Media, counts: Sequence[int] | None, num_prompts: int, kind: str
) -> list[Media]:
    """One list per prompt from nested items; None counts as no medium."""
    if len(media) != num_prompts:
        raise ValueError(
            f"{kind}: a nested list needs one entry per prompt: got {len(media)} entries for "
            f"{num_prompts} prompts"
        )
    groups: list[Media] = []
    for i, item in enumerate(media):
        group = _as_group(item)
        present = [m for m in group if m is not None]
        if counts is not None and counts[i] not in (len(group), len(present)):
            raise ValueError(
                f"{kind}: prompt {i} has {len(present)} but {kind}_num says {counts[i]}"
            )
        groups.append(present)
    return groups


def group_media(
    media: Media | None, counts: Sequence[int] | None, num_prompts: int, *, kind: str
) -> list[Media]:
    """Assigns media to prompts.

    Nested input has one list (or tuple, single item or None) per prompt. Flat input has all media
    in order and is cut by `counts`. Without counts a flat list must have one entry (an item or
    None) per prompt.

    Args:
        media: Flat or nested, or None.
        counts: Media per prompt, or None to infer it.
        num_prompts: Number of prompts.
        kind: "images" or "videos", for messages.

    Raises:
        ValueError: Counts and media do not agree; the message has the numbers.
    """
    if counts is not None and len(counts) != num_prompts:
        raise ValueError(
            f"{kind}_num needs one count per prompt: got {len(counts)} for {num_prompts} prompts"
        )
    if media is None:
        if counts is not None and any(counts):
            raise ValueError(f"{kind}_num asks for {sum(counts)} {kind}, but none were given")
        return [[] for _ in range(num_prompts)]
    if counts is None or any(isinstance(item, list | tuple) for item in media):
        return _grouped(media, counts, num_prompts, kind)
    if sum(counts) != len(media):
        if len(media) == num_prompts:
            # One entry per prompt with None for "no image": the count of such a prompt is 0 or 1.
            return _grouped(media, counts, num_prompts, kind)
        raise ValueError(
            f"{kind}: a flat list must have sum({kind}_num) = {sum(counts)} entries, "
            f"got {len(media)}"
        )
    groups: list[Media] = []
    start = 0
    for count in counts:
        groups.append([m for m in media[start : start + count] if m is not None])
        start += count
    return groups


def build_multimodal_inputs(
    prompts: Sequence[str],
    *,
    images: Media | None,
    images_num: Sequence[int] | None,
    videos: Media | None,
    videos_num: Sequence[int] | None,
) -> list[dict[str, object]]:
    """One `{"prompt", "multi_modal_data"?}` per prompt.

    `multi_modal_data` maps "image" and "video" to non-empty lists. A prompt without any medium
    loses its image and video placeholders; other prompts are left unchanged.

    Raises:
        ValueError: Counts and media do not agree.
    """
    image_groups = group_media(images, images_num, len(prompts), kind="images")
    video_groups = group_media(videos, videos_num, len(prompts), kind="videos")
    inputs: list[dict[str, object]] = []
    for prompt, own_images, own_videos in zip(prompts, image_groups, video_groups, strict=True):
        media: dict[str, list[object]] = {}
        if own_images:
            media["image"] = list(own_images)
        if own_videos:
            media["video"] = list(own_videos)
        if media:
            inputs.append({"prompt": prompt, "multi_modal_data": media})
        else:
            stripped = VIDEO_PLACEHOLDER.sub("", IMAGE_PLACEHOLDER.sub("", prompt))
            inputs.append({"prompt": stripped})
    return inputs


def media_of(item: Mapping[str, object], kind: str) -> tuple[object, ...]:
    """The "image" or "video" list of one input; a single medium counts as a list of one."""
    data = item.get("multi_modal_data")
    if not isinstance(data, Mapping) or data.get(kind) is None:
        return ()
    found = data[kind]
    return tuple(found) if isinstance(found, list | tuple) else (found,)

"""Media of prompts, from the rank that sampled them to the ranks that train their rows."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.prompts import EncodedPrompt, MediumKind, RowMedia
from lightrft.engines.media.sources import ImageSource, VideoSource
from lightrft.engines.types import GenerationRequest, MultiModalInputs
from lightrft.experience.exchange import RowTable
from lightrft.experience.types import ScoredRollout
from lightrft.strategy.strategy_base import StrategyBase

_KINDS: tuple[MediumKind, ...] = ("image", "video")


def media_request(
    prompt: Prompt, request_id: int, encoder: PromptEncoder | None
) -> GenerationRequest:
    """A request with the prompt's media, if it has any.

    Args:
        prompt: What to complete.
        request_id: Fixes its random numbers.
        encoder: Of the model; None for models of text.

    Raises:
        ConfigError: There are media and no encoder.
    """
    request = GenerationRequest(prompt.token_ids, request_id, prompt_text=prompt.text)
    if not prompt.images and not prompt.videos:
        return request
    encoded = encode_prompt(prompt, encoder)
    return GenerationRequest(
        prompt.token_ids,
        request_id,
        prompt_text=prompt.text,
        multi_modal=MultiModalInputs(prompt.images, prompt.videos),
        encoded=encoded,
    )


def encode_prompt(prompt: Prompt, encoder: PromptEncoder | None) -> EncodedPrompt:
    """A prompt as the processor gives it; the same object until the encoder forgets it."""
    if encoder is None:
        raise ConfigError(
            f"prompt {prompt.id} has images or videos: the trainer needs the model's processor "
            "(processor=) and a vision-language model"
        )
    return encoder.kept(prompt.text, images=prompt.images, videos=prompt.videos)


def check_media(prompts: Sequence[Prompt], config: TrainConfig) -> None:
    """Raises a ConfigError if prompts have media and an option cannot be used with them."""
    has_media = [prompt.id for prompt in prompts if prompt.images or prompt.videos]
    if not has_media:
        return
    used = [name for name in ("use_fire", "partial_rollout") if getattr(config, name)]
    if used:
        raise ConfigError(
            f"{used[0]} continues responses, which prompts with images or videos do not allow: "
            f"got rows {has_media[:10]}; leave it out, or the media with text_only"
        )


@dataclass(frozen=True, slots=True)
class _Sources:
    """What a prompt is encoded from."""

    text: str
    images: tuple[ImageSource, ...]
    videos: tuple[VideoSource, ...]


def deliver_media(
    table: RowTable,
    scored: Sequence[ScoredRollout],
    wanted: Sequence[NDArray[np.int64]],
    strategy: StrategyBase,
    encoder: PromptEncoder,
) -> RowMedia:
    """The media of the rows that this rank wants; collective.

    Original bytes travel, once for each prompt and rank, and pixels are made where rows are
    trained; the rows of a prompt share them.

    Args:
        table: The rows of all ranks.
        scored: The samples of this rank.
        wanted: Which rows of `table` each rank wants, the same on every rank.
        strategy: Brings bytes from rank to rank.
        encoder: Of the model.
    """
    rank = strategy.get_rank()
    own = {
        item.rollout.group_id: item.rollout.prompt
        for item in scored
        if item.rollout.prompt.images or item.rollout.prompt.videos
    }
    parts = [
        b"" if receiver == rank else _pack(own, _groups(table, rows, rank))
        for receiver, rows in enumerate(wanted)
    ]
    found: dict[int, EncodedPrompt] = {
        group: encode_prompt(own[group], encoder)
        for group in _groups(table, wanted[rank], rank)
        if group in own
    }
    for data in strategy.exchange_bytes(parts):
        for group, sources in _unpack(data):
            found[group] = encoder.kept(sources.text, images=sources.images, videos=sources.videos)
    prompts = tuple(found.get(group) for group in table.group_ids[wanted[rank]].tolist())
    return RowMedia(prompts, agree_on_kinds(strategy, RowMedia(prompts).kinds))


def agree_on_kinds(strategy: StrategyBase, kinds: Collection[MediumKind]) -> frozenset[MediumKind]:
    """Kinds of media that some rank has, from those of this rank; collective."""
    counts = strategy.all_reduce({kind: int(kind in kinds) for kind in _KINDS}, op="max")
    return frozenset(kind for kind in _KINDS if counts[kind])


def _groups(table: RowTable, rows: NDArray[np.int64], holder: int) -> list[int]:
    """Groups of some rows whose samples a rank holds, each once."""
    held = rows[table.holders[rows] == holder]
    return list(dict.fromkeys(table.group_ids[held].tolist()))


def _pack(prompts: Mapping[int, Prompt], groups: Sequence[int]) -> bytes:
    """A line of JSON with all lengths, then the bytes of all media one after the other."""
    blobs: list[bytes] = []

    def stored(source: ImageSource) -> list[object]:
        blobs.append(source.read())
        return [source.name, len(blobs[-1])]

    header = [
        {
            "group": group,
            "text": prompts[group].text,
            "images": [stored(image) for image in prompts[group].images],
            "videos": [
                [video.name, video.fps, [stored(frame) for frame in video.frames]]
                for video in prompts[group].videos
            ],
        }
        for group in groups
        if group in prompts
    ]
    return json.dumps(header).encode() + b"\n" + b"".join(blobs) if header else b""


def _unpack(data: bytes) -> Iterable[tuple[int, _Sources]]:
    if not data:
        return
    header, _, rest = data.partition(b"\n")
    place = 0

    def source(name: str, length: int) -> ImageSource:
        nonlocal place
        place += length
        return ImageSource(name, content=rest[place - length : place])

    for item in json.loads(header):
        images = tuple(source(name, length) for name, length in item["images"])
        videos = tuple(
            VideoSource(name, tuple(source(*frame) for frame in frames), fps)
            for name, fps, frames in item["videos"]
        )
        yield int(item["group"]), _Sources(str(item["text"]), images, videos)

"""Generation on a rollout engine: its options and requests, and the distribution of its lengths."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from lightrft.config import StrategyConfig, TrainConfig
from lightrft.engines.base import RolloutEngine
from lightrft.engines.factory import ENGINES, build_engine, engine_facts, resolve_engine_type
from lightrft.engines.types import (
    EngineConfig,
    GenerationRequest,
    MediaBounds,
    MultiModalInputs,
    SamplingParams,
)
from lightrft.kernels.names import nearest_names
from lightrft.strategy.backend import Arguments
from lightrft.strategy.distributed.collectives import Group, gather_objects

IMAGE_PLACEHOLDER = re.compile(r"<\|vision_start\|>(?:<\|image_pad\|>)+<\|vision_end\|>")
VIDEO_PLACEHOLDER = re.compile(r"<\|vision_start\|>(?:<\|video_pad\|>)+<\|vision_end\|>")
PERCENTILES = (50, 80, 95)
MAX_BARS = 40
Media = Sequence[object]
PromptItem = Sequence[int] | GenerationRequest


def check_engine_type(engine_type: str) -> str:
    """Resolve "auto" and refuse unknown names.

    Raises:
        ValueError: No engine has this name.
    """
    known = {*ENGINES, "auto"}
    if engine_type not in known:
        raise ValueError(f"Unsupported engine type: {engine_type}; known types: {sorted(known)}")
    return resolve_engine_type(engine_type)


def engine_config(
    config: StrategyConfig, engine_type: str, *, has_gpu: bool, module: nn.Module | None
) -> EngineConfig:
    """Return the configuration of an engine, from that of a strategy.

    Raises:
        ValueError: Neither a checkpoint directory (`pretrain`) nor a module is known.
    """
    if config.pretrain is None and module is None:
        raise ValueError(
            f"the {engine_type} engine needs a model: set pretrain (a checkpoint directory) or "
            "pass actor= to setup_inference_engine"
        )
    return EngineConfig(
        engine_type=engine_type,
        model_path=config.pretrain or "",
        dtype="bfloat16" if config.computes_in_bf16(has_gpu=has_gpu) else "float32",
        tensor_parallel_size=config.engine_tp_size if engine_facts(engine_type).spans_ranks else 1,
        memory_utilization=config.engine_mem_util,
        max_model_len=config.max_len,
        seed=config.seed,
        enable_sleep=config.enable_engine_sleep,
        options=dict(config.engine_args or {}),
        media=media_bounds(config),
        awaits_weights=module is not None and not holds_saved_buffers(module),
    )


def holds_saved_buffers(module: nn.Module) -> bool:
    """Return whether a model's files have numbers besides parameters; no weight sync sends them."""
    return any(
        buffer.is_floating_point() and name not in each._non_persistent_buffers_set
        for each in module.modules()
        for name, buffer in each.named_buffers(recurse=False)
    )


def media_bounds(config: StrategyConfig) -> MediaBounds:
    """Return bounds of the media of a run; none for a strategy alone.

    Environments show images that no row has: their prompts are not counted.
    """
    if not isinstance(config, TrainConfig):
        return MediaBounds()
    limits = {
        "image": config.limit_mm_image_per_prompt,
        "video": config.limit_mm_video_per_prompt,
        "audio": config.limit_mm_audio_per_prompt,
    }
    counted = {} if config.has_episodes else limits
    return MediaBounds(
        config.max_pixels,
        config.min_pixels,
        {kind: limit for kind, limit in counted.items() if limit is not None},
        config.video_fps,
        config.video_max_frames,
    )


def rollout_engine(args: Arguments, engine_type: str) -> RolloutEngine:
    """Start an engine without a strategy, from a strategy's options."""
    config = StrategyConfig.from_args(args)
    has_gpu = torch.cuda.is_available()
    return build_engine(engine_config(config, engine_type, has_gpu=has_gpu, module=None))


def as_sampling_params(given: object, engine: RolloutEngine) -> SamplingParams:
    """Return `SamplingParams` from itself, a mapping of its fields or the engine's native object.

    Raises:
        ValueError: The mapping has unknown names, or the engine's object has unusable settings.
        TypeError: It is none of them.
    """
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping):
        converted = engine.params_of_native(given)
        if converted is not None:
            return converted
        raise TypeError(
            "sampling_params must be a lightrft.engines.SamplingParams or a mapping with its field "
            "names, or the engine's own object, got "
            f"{type(given).__module__}.{type(given).__qualname__}"
        )
    known = [entry.name for entry in dataclasses.fields(SamplingParams)]
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        hints = [name + nearest_names(name, known) for name in unknown]
        raise ValueError(f"unknown sampling parameters: {', '.join(hints)}; known: {known}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return dataclasses.replace(SamplingParams(), **values)  # type: ignore[arg-type]


def has_media(media: Media | None) -> bool:
    """Return whether anything but None is in a flat or nested list."""
    if media is None:
        return False
    return any(inner is not None for item in media for inner in _as_group(item))


def _as_group(item: object) -> Media:
    return item if isinstance(item, list | tuple) else [item]


def _grouped(
    media: Media, counts: Sequence[int] | None, num_prompts: int, kind: str
) -> list[Media]:
    """Return one list per prompt from nested items; None counts as no medium."""
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
    """Assign media to prompts.

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
            # One entry per prompt, where None means no image, so each count is 0 or 1.
            return _grouped(media, counts, num_prompts, kind)
        raise ValueError(
            f"{kind}: a flat list must have sum({kind}_num) = {sum(counts)} entries, "
            f"got {len(media)}"
        )
    stops = accumulate(counts, initial=0)
    return [[m for m in media[start:stop] if m is not None] for start, stop in pairwise(stops)]


def build_multimodal_inputs(
    prompts: Sequence[str],
    *,
    images: Media | None,
    images_num: Sequence[int] | None,
    videos: Media | None,
    videos_num: Sequence[int] | None,
) -> list[dict[str, object]]:
    """Return one `{"prompt", "multi_modal_data"?}` per prompt.

    `multi_modal_data` maps "image" and "video" to non-empty lists. A prompt without any medium
    loses its image and video placeholders; other prompts are left unchanged.

    Raises:
        ValueError: Counts and media do not agree.
    """
    image_groups = group_media(images, images_num, len(prompts), kind="images")
    video_groups = group_media(videos, videos_num, len(prompts), kind="videos")
    inputs: list[dict[str, object]] = []
    for prompt, prompt_images, prompt_videos in zip(
        prompts, image_groups, video_groups, strict=True
    ):
        groups = (("image", prompt_images), ("video", prompt_videos))
        media = {kind: list(group) for kind, group in groups if group}
        if media:
            inputs.append({"prompt": prompt, "multi_modal_data": media})
        else:
            stripped = VIDEO_PLACEHOLDER.sub("", IMAGE_PLACEHOLDER.sub("", prompt))
            inputs.append({"prompt": stripped})
    return inputs


def media_of(item: Mapping[str, object], kind: str) -> tuple[object, ...]:
    """Return the "image" or "video" list of one input; a single medium is a list of one."""
    data = item.get("multi_modal_data")
    if not isinstance(data, Mapping) or data.get(kind) is None:
        return ()
    items = data[kind]
    return tuple(items) if isinstance(items, list | tuple) else (items,)


def text_requests(items: Sequence[PromptItem], first_id: int) -> list[GenerationRequest]:
    """Return requests from token ids or ready requests.

    Args:
        items: Lists of token ids, or requests, which keep their ids.
        first_id: Request id of the first bare list; it increases by one per list.
    """
    return [
        item
        if isinstance(item, GenerationRequest)
        else GenerationRequest(tuple(int(t) for t in item), request_id=first_id + i)
        for i, item in enumerate(items)
    ]


def multimodal_requests(
    inputs: Sequence[Mapping[str, object]],
    first_id: int,
    token_ids: Sequence[PromptItem] | None = None,
) -> list[GenerationRequest]:
    """Return requests from `{"prompt", "multi_modal_data"?}` items.

    Args:
        inputs: Items as `build_multimodal_inputs` makes them.
        first_id: Request id of the first item.
        token_ids: Token ids of the same prompts, if known.
    """
    requests = []
    for i, item in enumerate(inputs):
        ids = () if token_ids is None else token_ids[i]
        requests.append(
            GenerationRequest(
                prompt_token_ids=(
                    ids.prompt_token_ids if isinstance(ids, GenerationRequest) else tuple(ids)
                ),
                request_id=ids.request_id if isinstance(ids, GenerationRequest) else first_id + i,
                prompt_text=str(item["prompt"]),
                multi_modal=MultiModalInputs(media_of(item, "image"), media_of(item, "video")),
            )
        )
    return requests


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """The arguments of `gather_and_generate`: this rank's prompts in one of two forms.

    Args:
        token_ids: Token ids (or requests), one per prompt.
        texts: Prompts as text, needed with images or videos.
        images, images_num, videos, videos_num: See `build_multimodal_inputs`.
    """

    token_ids: Sequence[PromptItem] | None
    texts: Sequence[str] | None = None
    images: Sequence[object] | None = None
    images_num: Sequence[int] | None = None
    videos: Sequence[object] | None = None
    videos_num: Sequence[int] | None = None

    @property
    def is_multimodal(self) -> bool:
        """Return whether this rank has any image or video."""
        return has_media(self.images) or has_media(self.videos)

    def __len__(self) -> int:
        for prompts in (self.token_ids, self.texts):
            if prompts is not None:
                return len(prompts)
        return 0

    def requests(self, first_id: int, *, is_multimodal: bool) -> list[GenerationRequest]:
        """Return requests of this rank; multimodal if any rank of the call has images or videos.

        Raises:
            ValueError: The needed form is missing, or counts do not agree.
        """
        if self.texts is not None and (is_multimodal or self.token_ids is None):
            if self.token_ids is not None and len(self.token_ids) != len(self.texts):
                raise ValueError(
                    "all_prompts and all_prompt_token_ids must have the same length: got "
                    f"{len(self.texts)} and {len(self.token_ids)}"
                )
            inputs = build_multimodal_inputs(
                self.texts,
                images=self.images,
                images_num=self.images_num,
                videos=self.videos,
                videos_num=self.videos_num,
            )
            return multimodal_requests(inputs, first_id, self.token_ids)
        if self.is_multimodal:
            raise ValueError("images and videos need all_prompts (the prompts as text)")
        if self.token_ids is None:
            raise ValueError("either all_prompt_token_ids or all_prompts must be given")
        return text_requests(self.token_ids, first_id)


def as_prompts(items: Sequence[PromptItem] | Sequence[int]) -> list[PromptItem]:
    """Return prompts from prompts, or from the token ids of one."""
    if items and all(isinstance(item, int) for item in items):
        return [cast("Sequence[int]", items)]
    return [cast("PromptItem", item) for item in items]


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Generated tokens per completion, over all ranks of a step.

    Args:
        total_samples: Completions.
        min_length, max_length, mean_length, median_length: In tokens.
        percentiles: Percent -> tokens (linear interpolation).
    """

    total_samples: int
    min_length: int
    max_length: int
    mean_length: float
    median_length: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthStatistics:
        """Return statistics of a non-empty list of lengths."""
        values = np.asarray(lengths)
        return cls(
            total_samples=len(values),
            min_length=int(values.min()),
            max_length=int(values.max()),
            mean_length=float(values.mean()),
            median_length=float(np.median(values)),
            percentiles={p: float(np.percentile(values, p)) for p in PERCENTILES},
        )


class GenLenAnalyser:
    """A collector of generation lengths every N steps, written as JSON and as a picture.

    Args:
        plot_every: Interval in steps; 0 or less switches the analyser off.
        log_dir: Folder for `gen_len_step_{step}.json` and `.png`; None writes nothing.
        group: Ranks to collect from; None is all.

    Raises:
        ImportError: Pictures are asked for and matplotlib is not installed.
    """

    def __init__(self, *, plot_every: int, log_dir: str | None, group: Group = None) -> None:
        self.plot_every = plot_every
        self.log_dir = None if log_dir is None else Path(log_dir)
        self.group = group
        if plot_every > 0 and log_dir is not None:
            require_matplotlib()

    def is_scheduled(self, step: int) -> bool:
        """Return whether `collect` does anything at this step; equal on all ranks."""
        return self.plot_every > 0 and step % self.plot_every == 0

    def collect(
        self, lengths: Sequence[int], step: int, *, writes_files: bool
    ) -> LengthStatistics | None:
        """Compute statistics over all ranks, whose counts may differ. Collective when due.

        Args:
            lengths: Generated tokens of each of this rank's completions.
            step: Number of the generation call.
            writes_files: Whether this rank writes the files.

        Returns:
            Statistics; None if not due, or if nothing was generated anywhere.
        """
        if not self.is_scheduled(step):
            return None
        everything = [n for part in gather_objects(list(lengths), self.group) for n in part]
        if not everything:
            return None
        statistics = LengthStatistics.of(everything)
        if writes_files and self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            stem = self.log_dir / f"gen_len_step_{step}"
            record = {"step": step, **asdict(statistics), "lengths": everything}
            stem.with_suffix(".json").write_text(json.dumps(record), encoding="utf-8")
            stem.with_suffix(".png").write_bytes(histogram_png(everything, step=step))
        return statistics


def require_matplotlib() -> None:
    """Check before a run, not at its first picture, whether pictures can be drawn.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "plot_every > 0 together with log_dir draws histograms and needs the package "
            "matplotlib: install lightrft[plots], or leave plot_every at -1"
        ) from error


def histogram_png(lengths: Sequence[int], *, step: int) -> bytes:
    """Draw a histogram with at most 40 bars.

    Args:
        lengths: At least one number.
        step: Step for the title, beside the mean.

    Returns:
        Contents of a PNG file.
    """
    # The object interface: pyplot would keep a reference to its figures.
    from matplotlib.figure import Figure

    values = np.asarray(lengths)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(values, bins=min(MAX_BARS, len(np.unique(values))))
    axes.set_xlabel("generated tokens")
    axes.set_ylabel("completions")
    axes.set_title(
        f"step {step}: mean {values.mean():.1f}, shortest {values.min()}, longest {values.max()}"
    )
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


@dataclass(slots=True)
class GenerationWork:
    """Seconds of this rank's engine since the last query.

    Args:
        busy_seconds: Seconds in calls.
        thin_seconds: Part of these lost because few responses were left; see `thin_seconds`.
    """

    busy_seconds: float = 0.0
    thin_seconds: float = 0.0

    def add(self, finishes: Sequence[tuple[float, int]], seconds: float) -> None:
        """Add a call of the engine; see `thin_seconds`."""
        self.busy_seconds += seconds
        self.thin_seconds += thin_seconds(finishes, seconds)


def thin_seconds(finishes: Sequence[tuple[float, int]], seconds: float) -> float:
    """Return the seconds a call would save if it stayed as fast as while all its rows ran.

    seconds - (all tokens) / (tokens a second until a quarter of the rows has ended); at least 0.
    All rows are assumed to run from the beginning: with more rows than an engine runs at once the
    result is too large. 0 where an engine returns all its rows at the end.

    Args:
        finishes: For each row, the second in which it came, and its tokens.
        seconds: Duration of the call.
    """
    ordered = sorted(finishes)
    if not ordered or ordered[0][0] >= seconds or not ordered[-1][1]:
        return 0.0
    first, length = ordered[(len(ordered) - 1) // 4]
    at_full = sum(min(tokens, max(1, length)) for _, tokens in ordered) / max(first, 1e-9)
    return max(0.0, seconds - sum(tokens for _, tokens in ordered) / at_full)

"""Options of one part of a run: images, videos and sounds of rows."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    DATA_AND_EVAL,
    SFT,
    data_option,
)


@dataclass(kw_only=True)
class MediaOptions:
    """Images, videos and sounds of rows."""

    images_key: str = data_option(
        "images",
        "Column with the images of a prompt: paths relative to the file, bytes or "
        "base64, one or a list. The default also finds a column called image.",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    videos_key: str = data_option(
        "videos",
        "Column with the videos of a prompt: films, animated images, or objects with frames and "
        "fps. "
        "The default also finds a column called video.",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    audios_key: str = data_option(
        "audios",
        "Column with the sounds of a prompt: paths relative to the file, bytes, base64 or arrays "
        "with a sampling_rate. The default also finds a column called audio.",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    media_root: str | None = data_option(
        None,
        "Folder in which media of rows may lie, beside that of the data file; / allows every file.",
        may_change=True,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    text_only: bool = data_option(
        False,
        "Leave images, videos and sounds of the data out, with their places.",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    max_pixels: int | None = data_option(
        None,
        "Most pixels of an image or frame; larger ones are scaled down. Unset is the "
        "processor's own.",
        at_least=1,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    min_pixels: int | None = data_option(
        None,
        "Fewest pixels of an image or frame; smaller ones are scaled up. Unset is the "
        "processor's own.",
        at_least=1,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    video_fps: float | None = data_option(
        None,
        "Frames a second that are taken of a video. Unset takes 2 of a film, and all of what is "
        "given as frames.",
        above=0,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    video_max_frames: int | None = data_option(
        None,
        "Most frames of a video, spread evenly. Unset takes 768 of a film.",
        at_least=2,
        at_most=4096,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    limit_mm_image_per_prompt: int | None = data_option(
        None,
        "Most images of a prompt; a row with more is an error. Unset sets no limit.",
        at_least=0,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    limit_mm_video_per_prompt: int | None = data_option(
        None,
        "Most videos of a prompt; a row with more is an error. Unset sets no limit.",
        at_least=0,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    limit_mm_audio_per_prompt: int | None = data_option(
        None,
        "Most sounds of a prompt; a row with more is an error. Unset sets no limit.",
        at_least=0,
        commands=(*DATA_AND_EVAL, *SFT),
    )

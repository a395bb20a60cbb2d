"""Kinds of media as one table, and the media of one prompt by their kinds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from lightrft.engines.media.sources import FileSource, ImageSource, VideoSource, as_image, as_video

MediumKind: TypeAlias = str
Medium: TypeAlias = FileSource | VideoSource


class Reader(Protocol):
    """Makes a medium of what data sets hold, or raises a MediaError."""

    def __call__(self, value: object, *, name: str, folder: Path) -> Medium:
        """See `as_image`."""
        ...


@dataclass(frozen=True, slots=True)
class MediaKind:
    """A row of the table: all that is particular to one kind of media.

    Its name is the type of its parts of messages, and `<name>` marks its places in texts.

    Args:
        plural: Its column in the data, unless the option `{plural}_key` names another.
        read: Makes a medium of what data sets hold.
        rebuild: Makes one of its name, its files and its facts, which came from another rank.
        arguments: Of a processor's call, from what the media of a prompt decode to.
        native: Form of a decoded medium for an engine with a processor of its own.
        is_scaled: Sizes to which a processor scales it belong to its name in such an engine.
    """

    plural: str
    read: Reader
    rebuild: Callable[[str, Sequence[FileSource], object], Medium]
    arguments: Callable[[Sequence[object]], dict[str, object]]
    native: Callable[[object], object] = lambda decoded: decoded
    is_scaled: bool = False


Clip: TypeAlias = tuple[object, Mapping[str, object]]


def _image(name: str, files: Sequence[FileSource], facts: object) -> ImageSource:
    del facts
    return ImageSource(name, content=files[0].read())


def _video(name: str, files: Sequence[FileSource], facts: object) -> VideoSource:
    frames = tuple(_image(file.name, [file], None) for file in files)
    return VideoSource(name, frames, cast("float | None", facts))


def _video_arguments(decoded: Sequence[object]) -> dict[str, object]:
    clips = cast("Sequence[Clip]", decoded)
    return {
        "videos": [[frames for frames, _ in clips]],
        "video_metadata": [[facts for _, facts in clips]],
        "do_sample_frames": False,
    }


def _native_video(decoded: object) -> Clip:
    frames, facts = cast("Clip", decoded)
    return frames, {**facts, "do_sample_frames": False}


# In the order in which a prompt without places of its own begins with them.
MEDIA_KINDS: dict[MediumKind, MediaKind] = {
    "image": MediaKind(
        "images", as_image, _image, lambda decoded: {"images": [decoded]}, is_scaled=True
    ),
    "video": MediaKind("videos", as_video, _video, _video_arguments, _native_video),
}


@dataclass(frozen=True, slots=True)
class Media:
    """The media of one prompt; iterating gives all of them, kind after kind.

    Args:
        by_kind: In the order of their placeholders; kinds without media may be missing.
    """

    by_kind: Mapping[MediumKind, Sequence[Medium]] = field(default_factory=dict)

    def __getitem__(self, kind: MediumKind) -> tuple[Medium, ...]:
        return tuple(self.by_kind.get(kind, ()))

    def __iter__(self) -> Iterator[Medium]:
        for kind in MEDIA_KINDS:
            yield from self[kind]

    def __bool__(self) -> bool:
        return any(self.by_kind.values())

    def __add__(self, more: "Media") -> "Media":
        return Media({kind: (*self[kind], *more[kind]) for kind in MEDIA_KINDS})

    @property
    def kinds(self) -> tuple[MediumKind, ...]:
        """Kinds of which there are some."""
        return tuple(kind for kind in MEDIA_KINDS if self[kind])

    @property
    def counts(self) -> str:
        """Numbers for messages: "2 images and 0 videos"."""
        return " and ".join(f"{len(self[k])} {row.plural}" for k, row in MEDIA_KINDS.items())

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """Its images."""
        return cast("tuple[ImageSource, ...]", self["image"])

    @property
    def videos(self) -> tuple[VideoSource, ...]:
        """Its videos."""
        return cast("tuple[VideoSource, ...]", self["video"])

"""Kinds of media as one table, and the media of one prompt by their kinds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from lightrft.engines.media.sources import FileSource, ImageSource, VideoSource, as_image, as_video

MediumKind: TypeAlias = str


class Medium(Protocol):
    """One medium: original bytes in one or several files, decoded when they are needed."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def digest(self) -> str:
        """Hash of its bytes: two media with one digest are one medium."""
        ...

    @property
    def files(self) -> Sequence[FileSource]:
        """The bytes that it is made of."""
        ...

    @property
    def facts(self) -> object:
        """The rest of it, as JSON."""
        ...


class MediaKind(Protocol):
    """A row of the table: all that is particular to one kind of media."""

    @property
    def name(self) -> MediumKind:
        """Type of its parts of messages; `<name>` marks its places in texts."""
        ...

    @property
    def plural(self) -> str:
        """Its column in the data, unless the option `{plural}_key` names another."""
        ...

    def read(self, value: object, *, name: str, folder: Path) -> Medium:
        """A medium from what data sets hold.

        Raises:
            MediaError: It is of no known form.
        """
        ...

    def rebuilt(self, name: str, files: Sequence[FileSource], facts: object) -> Medium:
        """A medium that came from another rank."""
        ...

    def processor_arguments(self, media: Sequence[Medium]) -> dict[str, object]:
        """Arguments of a processor's call, decoded."""
        ...

    def engine_data(
        self, media: Sequence[Medium], sizes: Mapping[str, object]
    ) -> tuple[list[object], list[str]]:
        """Media for an engine with a processor of its own, and a name for each."""
        ...


class ImageKind:
    """Images."""

    name, plural = "image", "images"

    def read(self, value: object, *, name: str, folder: Path) -> Medium:
        """See `MediaKind`."""
        return as_image(value, name=name, folder=folder)

    def rebuilt(self, name: str, files: Sequence[FileSource], facts: object) -> Medium:
        """See `MediaKind`."""
        del facts
        return ImageSource(name, content=files[0].read())

    def processor_arguments(self, media: Sequence[Medium]) -> dict[str, object]:
        """See `MediaKind`."""
        return {"images": [[cast("ImageSource", image).decode() for image in media]]}

    def engine_data(
        self, media: Sequence[Medium], sizes: Mapping[str, object]
    ) -> tuple[list[object], list[str]]:
        """See `MediaKind`."""
        pictures = cast("Sequence[ImageSource]", media)
        return [x.decode() for x in pictures], [f"{x.digest}{sizes or ''}" for x in pictures]


class VideoKind:
    """Videos, as frames."""

    name, plural = "video", "videos"

    def read(self, value: object, *, name: str, folder: Path) -> Medium:
        """See `MediaKind`."""
        return as_video(value, name=name, folder=folder)

    def rebuilt(self, name: str, files: Sequence[FileSource], facts: object) -> Medium:
        """See `MediaKind`."""
        frames = tuple(ImageSource(file.name, content=file.read()) for file in files)
        return VideoSource(name, frames, cast("float | None", facts))

    def processor_arguments(self, media: Sequence[Medium]) -> dict[str, object]:
        """See `MediaKind`."""
        clips = [cast("VideoSource", video).decode() for video in media]
        return {
            "videos": [[frames for frames, _ in clips]],
            "video_metadata": [[facts for _, facts in clips]],
            "do_sample_frames": False,
        }

    def engine_data(
        self, media: Sequence[Medium], sizes: Mapping[str, object]
    ) -> tuple[list[object], list[str]]:
        """See `MediaKind`."""
        del sizes
        clips = [cast("VideoSource", video).decode() for video in media]
        data = [(frames, {**facts, "do_sample_frames": False}) for frames, facts in clips]
        return list(data), [video.digest for video in media]


# In the order in which a prompt without places of its own begins with them.
MEDIA_KINDS: dict[MediumKind, MediaKind] = {"image": ImageKind(), "video": VideoKind()}


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

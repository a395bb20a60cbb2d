"""Table of media kinds, encoded prompts, and the media of a batch of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Self, TypeAlias, cast

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.engines.media.films import FrameRules
    from lightrft.engines.media.sounds import SoundRules, SoundSource
    from lightrft.engines.media.sources import FileSource, ImageSource, VideoSource

# In quotes, since checkpoint readers resolve it and runs of text import no readers of files.
Medium: TypeAlias = "FileSource | VideoSource"
MediumKind: TypeAlias = str


@dataclass(frozen=True, slots=True)
class MediaKind:
    """Row of the table: everything specific to one kind of media.

    Its name is the type of its message parts, and `<name>` marks its places in texts.

    Args:
        plural: Column in the data, unless the option `{plural}_key` names another.
        reader: "module:name" of the function that makes a medium from a data set's value; it is
            imported on first use, since most runs are text only.
        arguments: Function from the decoded media of a prompt to processor arguments.
        native: Function that converts a decoded medium for an engine with its processor.
        is_scaled: Whether its name in such an engine includes the sizes for scaling it.
        blank: Function from a small picture without content to a medium, as a data set has it.
    """

    plural: str
    reader: str
    arguments: Callable[[Sequence[object]], dict[str, object]]
    native: Callable[[object], object] = lambda decoded: decoded
    is_scaled: bool = False
    blank: Callable[[object], object] = lambda picture: picture

    def read(self, value: object, *, name: str, folder: Path) -> Medium:
        """Make a medium from a data set's value, like `as_image`."""
        medium: Medium = resolve_name(self.reader)(value, name=name, folder=folder)
        return medium


Clip: TypeAlias = tuple[object, Mapping[str, object]]
# Samples and their rate per second.
Sound: TypeAlias = tuple[object, int]


def _audio_arguments(decoded: Sequence[object]) -> dict[str, object]:
    """Return the arguments with the rate: processors refuse sounds of another rate."""
    sounds = cast("Sequence[Sound]", decoded)
    return {"audio": [sound for sound, _ in sounds], "sampling_rate": sounds[0][1]}


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


_SOURCES = "lightrft.engines.media.sources"
# In the order of media at the start of a prompt that has no places for them.
MEDIA_KINDS: dict[MediumKind, MediaKind] = {
    "image": MediaKind(
        "images", f"{_SOURCES}:as_image", lambda decoded: {"images": [decoded]}, is_scaled=True
    ),
    "video": MediaKind(
        "videos",
        f"{_SOURCES}:as_video",
        _video_arguments,
        _native_video,
        is_scaled=True,
        blank=lambda picture: {"frames": [picture] * 4, "fps": 1.0},
    ),
    "audio": MediaKind(
        "audios",
        "lightrft.engines.media.sounds:as_audio",
        _audio_arguments,
        blank=lambda _: {"array": [0.0] * 4000, "sampling_rate": 16000},
    ),
}


@dataclass(frozen=True, slots=True)
class Media:
    """Media of one prompt; iteration yields all of them, kind by kind.

    Args:
        by_kind: Media in the order of their placeholders; kinds without media may be missing.
    """

    by_kind: Mapping[MediumKind, Sequence[Medium]] = field(default_factory=dict)

    def __getitem__(self, kind: MediumKind) -> tuple[Medium, ...]:
        return tuple(self.by_kind.get(kind, ()))

    def __iter__(self) -> Iterator[Medium]:
        for kind in MEDIA_KINDS:
            yield from self[kind]

    def __bool__(self) -> bool:
        return any(self.by_kind.values())

    def __add__(self, more: Media) -> Media:
        return Media({kind: (*self[kind], *more[kind]) for kind in MEDIA_KINDS})

    @property
    def kinds(self) -> tuple[MediumKind, ...]:
        """Kinds that are present."""
        return tuple(kind for kind in MEDIA_KINDS if self[kind])

    @property
    def counts(self) -> str:
        """Counts for messages: "2 images and 0 videos", further kinds only if present."""
        return " and ".join(
            f"{len(self[kind])} {row.plural}"
            for kind, row in MEDIA_KINDS.items()
            if self[kind] or kind != "audio"
        )

    def in_memory(self, read: Callable[[FileSource], bytes]) -> Media:
        """Return a copy with the files' bytes, for a process that may not reach them.

        Args:
            read: Function that returns the bytes of a file.
        """
        return Media(
            {kind: [medium.in_memory(read) for medium in self[kind]] for kind in self.kinds}
        )

    def by_rules(self, frames: FrameRules, sounds: SoundRules | None = None) -> Media:
        """Return the media with rules for the frames of videos and the form of sounds.

        Args:
            frames: Rules for videos.
            sounds: Rules for sounds; None leaves them unchanged.
        """
        by_kind = dict(self.by_kind)
        if self["video"]:
            by_kind["video"] = [replace(video, rules=frames) for video in self.videos]
        if self["audio"] and sounds is not None:
            by_kind["audio"] = [sound.by_rules(sounds) for sound in self.audios]
        return Media(by_kind)

    def data_addresses(self) -> list[str]:
        """Return each file as a data address, for services and judges; a film as its frames."""
        return [file.data_address() for medium in self for file in medium.shown()]

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """Its images."""
        return cast("tuple[ImageSource, ...]", self["image"])

    @property
    def videos(self) -> tuple[VideoSource, ...]:
        """Its videos."""
        return cast("tuple[VideoSource, ...]", self["video"])

    @property
    def audios(self) -> tuple[SoundSource, ...]:
        """Its sounds."""
        return cast("tuple[SoundSource, ...]", self["audio"])


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of a prompt without its tensors: see `EncodedPrompt`."""

    token_ids: tuple[int, ...]
    request_token_ids: tuple[int, ...]
    kinds: frozenset[MediumKind]


@dataclass(frozen=True, slots=True, eq=False)
class MediaSpan:
    """Tokens of a row from the first to the last of media that were encoded together.

    Args:
        start, stop: First of these tokens in the row, and the end of the last.
        tensors: Model inputs of these media by name.
    """

    start: int
    stop: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """Prompt as a processor returns it, shared by all samples of the prompt.

    Args:
        token_ids: Tokens with one placeholder for each feature of the media.
        request_token_ids: Tokens with one placeholder for each medium, as engines take them.
        token_types: Kind of each of `token_ids`; None if the family has no such input.
        tensors: Model inputs of this prompt's media by name, in order of appearance.
        axes: Axis along which each input grows with the number of media; 0 for missing names.
        spans: Parts of `tensors`, in order, with their tokens; () if they cannot be told apart.
        kinds: Kinds of its media.
        media: Sources of the encoded media, for engines with their processor.
        sizes: Arguments that make such a processor scale images in the same way.
    """

    token_ids: tuple[int, ...]
    request_token_ids: tuple[int, ...]
    token_types: tuple[int, ...] | None
    tensors: Mapping[str, Tensor]
    kinds: frozenset[MediumKind]
    media: Media = field(default_factory=Media)
    sizes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    spans: tuple[MediaSpan, ...] = ()

    def continued(self, token_ids: Sequence[int]) -> Self:
        """Return the prompt followed by tokens of text."""
        if not token_ids:
            return self
        types = self.token_types
        return replace(
            self,
            token_ids=(*self.token_ids, *token_ids),
            request_token_ids=(*self.request_token_ids, *token_ids),
            token_types=None if types is None else (*types, *[0] * len(token_ids)),
        )

    @property
    def num_images(self) -> int:
        """Number of images that text attends to; `pixel_values` is [1, images, ...]."""
        return self.tensors["pixel_values"].shape[1] if "pixel_values" in self.tensors else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class LaterImages:
    """Images behind the prompt of a row, in text appended after a turn.

    Args:
        start: Place in the row of the first appended token of `text`.
        num_skipped: Number of first tokens of `text` that already stand before `start`.
        text: Piece of a chat template, with one placeholder for each image.
        images: Images in order of appearance.
    """

    start: int
    num_skipped: int
    text: str
    images: tuple[ImageSource, ...]

    @property
    def media(self) -> Media:
        """Its images."""
        return Media({"image": self.images})


@dataclass(frozen=True, slots=True)
class RowMedia:
    """Media of the rows of a batch, by reference: selecting rows copies no tensor.

    Args:
        prompts: Encoded prompt of each row; None for rows without media.
        present: Prompt with a blank medium of each kind that some rank has in this forward pass;
            every rank runs its vision tower once for each.
    """

    prompts: tuple[EncodedPrompt | None, ...] = ()
    present: Mapping[MediumKind, EncodedPrompt] = field(default_factory=dict)

    @property
    def kinds(self) -> frozenset[MediumKind]:
        """Kinds of these rows."""
        return frozenset(kind for prompt in self.prompts if prompt for kind in prompt.kinds)

    def of_rows(self, num_rows: int) -> tuple[EncodedPrompt | None, ...]:
        """Return the prompt of each row; None for all rows of a batch without media."""
        return self.prompts or (None,) * num_rows

    @property
    def is_empty(self) -> bool:
        """Return whether neither these rows nor those of other ranks have media."""
        return not self.kinds and not self.present

    def __getitem__(self, rows: slice) -> Self:
        return type(self)(self.prompts[rows], self.present)


NO_MEDIA = RowMedia()

"""Kinds of media as one table, prompts that have some, and the media of a batch of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias, cast

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.engines.media.encoder import PromptEncoder
    from lightrft.engines.media.films import FrameRules
    from lightrft.engines.media.sounds import SoundRules, SoundSource
    from lightrft.engines.media.sources import FileSource, ImageSource, VideoSource
    from lightrft.engines.types import MediaBounds

    Medium: TypeAlias = FileSource | VideoSource
else:
    # Readers of files resolve annotations: checkpoints hold prompts, whose media they only name.
    Medium = object

MediumKind: TypeAlias = str
# Bytes of the shortest signature of a file.
_SIGNATURE_BYTES = 4


class MediaError(ValueError):
    """A medium cannot be read; the message says which, why, and what to do."""


def is_list_of_bytes(value: object) -> bool:
    """Whether a list is the encoded bytes of a file, as JSON holds them."""
    return (
        isinstance(value, list)
        and len(value) > _SIGNATURE_BYTES
        and all(isinstance(item, int) and 0 <= item < 256 for item in value)
    )


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
# Samples and how many are a second.
Sound: TypeAlias = tuple[object, int]


# Readers of files are imported by the first row that has some: most runs are of text.


def _read_image(value: object, *, name: str, folder: Path) -> Medium:
    from lightrft.engines.media.sources import as_image

    return as_image(value, name=name, folder=folder)


def _read_video(value: object, *, name: str, folder: Path) -> Medium:
    from lightrft.engines.media.sources import as_video

    return as_video(value, name=name, folder=folder)


def _read_audio(value: object, *, name: str, folder: Path) -> Medium:
    from lightrft.engines.media.sounds import as_audio

    return as_audio(value, name=name, folder=folder)


def _image(name: str, files: Sequence[FileSource], facts: object) -> ImageSource:
    from lightrft.engines.media.sources import ImageSource

    del facts
    return ImageSource(name, content=files[0].read())


def _video(name: str, files: Sequence[FileSource], facts: object) -> VideoSource:
    from lightrft.engines.media.sources import VideoSource

    frames = tuple(_image(file.name, [file], None) for file in files)
    fps, rules = cast("tuple[float | None, FrameRules]", facts)
    return VideoSource(name, frames, fps, rules)


def _audio(name: str, files: Sequence[FileSource], facts: object) -> SoundSource:
    from lightrft.engines.media.sounds import SoundSource

    return SoundSource(name, content=files[0].read(), rules=cast("SoundRules", facts))


def _audio_arguments(decoded: Sequence[object]) -> dict[str, object]:
    """Named with their rate: a processor of another one refuses them."""
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


# In the order in which a prompt without places of its own begins with them.
MEDIA_KINDS: dict[MediumKind, MediaKind] = {
    "image": MediaKind(
        "images", _read_image, _image, lambda decoded: {"images": [decoded]}, is_scaled=True
    ),
    "video": MediaKind(
        "videos", _read_video, _video, _video_arguments, _native_video, is_scaled=True
    ),
    "audio": MediaKind("audios", _read_audio, _audio, _audio_arguments),
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

    def __add__(self, more: Media) -> Media:
        return Media({kind: (*self[kind], *more[kind]) for kind in MEDIA_KINDS})

    @property
    def kinds(self) -> tuple[MediumKind, ...]:
        """Kinds of which there are some."""
        return tuple(kind for kind in MEDIA_KINDS if self[kind])

    @property
    def counts(self) -> str:
        """Numbers for messages: "2 images and 0 videos", further kinds where there are some."""
        return " and ".join(
            f"{len(self[kind])} {row.plural}"
            for kind, row in MEDIA_KINDS.items()
            if self[kind] or kind != "audio"
        )

    def loaded(self) -> Media:
        """The same with the bytes of its files, for a process that may not reach them."""
        if not self:
            return self
        from lightrft.engines.media.sources import FileSource

        return Media(
            {
                kind: [
                    MEDIA_KINDS[kind].rebuild(
                        medium.name,
                        [FileSource(f.name, content=f.read()) for f in medium.files],
                        medium.facts,
                    )
                    for medium in self[kind]
                ]
                for kind in self.kinds
            }
        )

    def by_rules(self, frames: FrameRules, sounds: SoundRules | None = None) -> Media:
        """The same media: of its videos the frames that rules take, its sounds as they are heard.

        Args:
            frames: Of videos.
            sounds: Of sounds; None leaves them as they are.
        """
        found = dict(self.by_kind)
        if self["video"]:
            found["video"] = [replace(video, rules=frames) for video in self.videos]
        if self["audio"] and sounds is not None:
            found["audio"] = [sound.by_rules(sounds) for sound in self.audios]
        return Media(found)

    def data_addresses(self) -> list[str]:
        """The bytes of each file as a data address, of a film its frames: for services, judges."""
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
    """Tokens of a prompt, for which no pixels are kept: see `EncodedPrompt`."""

    token_ids: tuple[int, ...]
    request_token_ids: tuple[int, ...]
    kinds: frozenset[MediumKind]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """One prompt as a processor gives it; the samples of the prompt share it.

    Args:
        token_ids: The prompt, with one placeholder token for each feature of its media.
        request_token_ids: The same with one placeholder for each medium, as engines take it.
        token_types: Of each of `token_ids`, the kind the model tells apart; None where the family
            has no such input.
        tensors: Inputs of the model by name, of the media of this prompt only, in order of
            appearance.
        kinds: Media that it has.
        media: Sources that it was encoded from, for engines with a processor of their own.
        sizes: Arguments that make such a processor scale images in the same way.
    """

    token_ids: tuple[int, ...]
    request_token_ids: tuple[int, ...]
    token_types: tuple[int, ...] | None
    tensors: Mapping[str, Tensor]
    kinds: frozenset[MediumKind]
    media: Media = field(default_factory=Media)
    sizes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def continued(self, token_ids: Sequence[int]) -> Self:
        """The prompt with tokens of text behind it."""
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
        """Images of a prompt that text attends to, [1, images, ...]."""
        return self.tensors["pixel_values"].shape[1] if "pixel_values" in self.tensors else 0

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class LaterImages:
    """Images that stand behind the prompt of a row, in what was appended after a turn.

    Args:
        start: Place in the row of the first token of `text`.
        num_skipped: First tokens of `text` that are not appended: they are what stands before it.
        text: A piece of a chat template, with one placeholder for each image.
        images: In order of appearance.
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
    """The media of the rows of a batch, by reference: selecting rows copies no tensor.

    Args:
        prompts: Of each row; None for rows without media.
        present: Kinds that some rank has among the rows of this forward pass; every rank then runs
            its vision tower once for each.
    """

    prompts: tuple[EncodedPrompt | None, ...] = ()
    present: frozenset[MediumKind] = frozenset()

    @property
    def kinds(self) -> frozenset[MediumKind]:
        """Kinds of these rows."""
        return frozenset(kind for prompt in self.prompts if prompt for kind in prompt.kinds)

    def of_rows(self, num_rows: int) -> tuple[EncodedPrompt | None, ...]:
        """Of each of the rows; a batch without media need not name them."""
        return self.prompts or (None,) * num_rows

    @property
    def is_empty(self) -> bool:
        """Whether neither these rows nor those of other ranks have media."""
        return not self.kinds and not self.present

    def __getitem__(self, rows: slice) -> Self:
        return type(self)(self.prompts[rows], self.present)


NO_MEDIA = RowMedia()


class TextEncoder:
    """The encoder of a model that reads text only: all its results are empty."""

    reads_media = False
    marks: Mapping[MediumKind, str] = MappingProxyType({})
    placeholders = frozenset[str]()

    def check_places(self, text: str, media: Media) -> None:
        """Nothing: see `PromptEncoder`."""

    def kept(self, text: str, media: Media) -> EncodedPrompt:
        """Raises a ValueError: no prompt may have media."""
        raise ValueError(
            f"the prompt {text[:80]!r} has {media.counts}: the trainer needs the model's processor "
            "(processor=) and a vision-language model"
        )

    def kept_all(self, prompts: Sequence[tuple[str, Media]]) -> list[EncodedPrompt]:
        """Of each; see `kept`."""
        return [self.kept(text, media) for text, media in prompts]

    def row(
        self, token_ids: Sequence[int], prompt: EncodedPrompt | None, later: Sequence[LaterImages]
    ) -> EncodedPrompt | None:
        """The prompt: see `PromptEncoder`."""
        del token_ids, later
        return prompt

    def num_places(self, text: str) -> int:
        """None: see `PromptEncoder`."""
        del text
        return 0

    def fitted(self, media: Media, bounds: MediaBounds) -> Media:
        """The media as they are: see `PromptEncoder`."""
        del bounds
        return media

    @property
    def num_kept(self) -> int:
        """None: see `PromptEncoder`."""
        return 0

    def bytes_since(self, number: int) -> int:
        """None: see `PromptEncoder`."""
        del number
        return 0

    def forget(self, number: int = 0) -> None:
        """Does nothing: see `PromptEncoder`."""


TEXT_ENCODER = TextEncoder()
Encoder: TypeAlias = "TextEncoder | PromptEncoder"

"""Encoders of prompts with media to the inputs of models and engines."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrft.engines.media.families import VisionFamily, family_of
from lightrft.engines.media.files import MediaError
from lightrft.engines.media.films import FrameRules
from lightrft.engines.media.media import (
    MEDIA_KINDS,
    EncodedPrompt,
    LaterImages,
    Media,
    MediaSpan,
    MediumKind,
    PromptTokens,
)
from lightrft.engines.media.sounds import SoundRules
from lightrft.engines.types import MediaBounds
from lightrft.kernels.names import first_line

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from lightrft.engines.types import GenerationRequest

# Text inputs that every processor returns.
_TEXT_INPUTS = ("input_ids", "attention_mask")
# Width and height of a blank picture, and of another one.
_SQUARE, _WIDE = (64, 64), (160, 64)


class PromptEncoder:
    """Encoder of prompts with media, by a model's processor.

    Args:
        processor: Processor of the model.
        family: Family of the model.
    """

    reads_media = True

    def __init__(self, processor: "ProcessorMixin", family: VisionFamily) -> None:
        self.processor = processor
        self.family = family
        self._kept: dict[tuple[str, ...], EncodedPrompt] = {}
        self._blanks: dict[MediumKind, EncodedPrompt] = {}

    @cached_property
    def _nests(self) -> bool:
        """Return whether the processor takes images by prompt, not in one list."""
        if self.family.inputs is None:
            return True
        text, media = self._blank("image", 1)
        try:
            self.processor(text=[text], images=[[medium.decode() for medium in media]])
        except Exception:  # noqa: BLE001  processors raise anything
            return False
        return True

    @cached_property
    def axes(self) -> Mapping[str, int]:
        """Axis along which each input of images grows: one image and two of the same are tried."""
        if "image" not in self.marks:
            return {}
        one, two = (self._processed([self._blank("image", count)]) for count in (1, 2))
        return {
            name: next((i for i, n in enumerate(value.shape) if two[name].shape[i] == 2 * n), 0)
            for name, value in one.items()
            if self._is_of_media(name)
        }

    @cached_property
    def _splits(self) -> bool:
        """Return whether a call for pictures of two sizes gives what two calls give."""
        (kind, *_) = self.family.kinds
        prompts = [self._blank(kind, 1, size) for size in (_SQUARE, _WIDE)]
        together: list[EncodedPrompt] = []
        with suppress(ValueError):
            together = self._encoded(prompts)
        return bool(together) and all(
            torch.equal(tensor, one.tensors[name])
            for one, prompt in zip(together, prompts, strict=True)
            for name, tensor in self.encode(*prompt).tensors.items()
        )

    @cached_property
    def hindrance(self) -> str:
        """Reason why the processor is not its family's, by encoding images; "" if it is.

        Families with a row are not tried: their processors are known.
        """
        if self.family.inputs is None:
            return ""
        if "image" not in self.marks:
            return "its processor has no image_token"
        try:
            for count in (1, 2):
                self.encode(*self._blank("image", count))
        except Exception as error:  # noqa: BLE001  processors give anything, too
            return first_line(error)
        return ""

    def blanks(self, kinds: Iterable[MediumKind]) -> dict[MediumKind, EncodedPrompt]:
        """Return a prompt with a small medium without content for each of some kinds."""
        for kind in kinds:
            if kind not in self._blanks:
                self._blanks[kind] = self.encode(*self._blank(kind, 1))
        return {kind: self._blanks[kind] for kind in kinds}

    def _blank(
        self, kind: MediumKind, count: int, size: tuple[int, int] = _SQUARE
    ) -> tuple[str, Media]:
        """Return a text with so many places, and media without content for them."""
        from PIL import Image  # of models that read media

        return self.question(kind, [MEDIA_KINDS[kind].blank(Image.new("RGB", size))] * count)

    def question(self, kind: MediumKind, values: Sequence[object]) -> tuple[str, Media]:
        """Return a message with media and a text behind them.

        Args:
            kind: Kind of the media.
            values: Media as a data set has them.
        """
        media = [MEDIA_KINDS[kind].read(v, name=f"a tried {kind}", folder=Path()) for v in values]
        text, mark = self._rendered(kind, len(media)), self.marks[kind]
        if text.count(mark) != len(media):
            text = f"{mark} " * len(media) + "?"
        return text, self.fitted(Media({kind: media}), MediaBounds())

    def _rendered(self, kind: MediumKind, count: int) -> str:
        """Return a message with so many media by the chat template; "" if it renders none."""
        parts = [*([{"type": kind}] * count), {"type": "text", "text": "?"}]
        messages = [{"role": "user", "content": parts}]
        with suppress(Exception):  # templates raise anything
            return str(self.processor.apply_chat_template(messages, tokenize=False))
        return ""

    def encode(self, text: str, media: Media) -> EncodedPrompt:
        """Encode one prompt.

        Args:
            text: Rendered chat template, with one placeholder for each medium.
            media: Media of the prompt, in order of appearance.

        Raises:
            MediaError: A medium cannot be read.
            ValueError: The family reads no such media, or text, media and the processor's output
                do not agree.
        """
        (encoded,) = self._encoded([(text, media)])
        return encoded

    def _encoded(self, prompts: Sequence[tuple[str, Media]]) -> list[EncodedPrompt]:
        """Encode a single prompt, or several of one kind; return [] if they cannot be separated."""
        outputs = self._processed(prompts)
        types = self.family.token_types
        if types is not None and types not in outputs:
            raise ValueError(
                f"the processor of {self.family.model_type} gave no {types}: positions and masks "
                "of images follow from it; load the processor that was saved with the model"
            )
        tensors = {name: value for name, value in outputs.items() if self._is_of_media(name)}
        parts = [tensors]
        if len(prompts) > 1:
            parts = self.family.split(tensors, [len([*media]) for _, media in prompts])
        encoded = []
        for number, ((text, media), inputs) in enumerate(zip(prompts, parts, strict=False)):
            is_token = outputs["attention_mask"][number].bool()
            kinds = {kind for kind, pixels in self.family.kinds.items() if pixels in inputs}
            one = EncodedPrompt(
                token_ids=tuple(outputs["input_ids"][number][is_token].tolist()),
                request_token_ids=self._text_ids(text),
                token_types=None
                if types is None
                else tuple(outputs[types][number][is_token].tolist()),
                tensors=inputs,
                kinds=frozenset(kinds),
                media=media,
                sizes=self._sizes(),
                axes=self.axes if kinds else {},
            )
            places = self._places(one)
            self._check_features(one, len(places))
            if kinds and places:
                spans = (MediaSpan(places[0], places[-1] + 1, inputs),)
                one = replace(one, spans=spans)
            encoded.append(one)
        return encoded

    def _processed(self, prompts: Sequence[tuple[str, Media]]) -> Mapping[str, Tensor]:
        """Return what the processor makes of prompts."""
        arguments = self._arguments(prompts)
        if self.family.token_types == "mm_token_type_ids":
            arguments["return_mm_token_type_ids"] = True  # not every processor's default
        try:
            outputs: Mapping[str, Tensor] = self.processor(
                return_tensors="pt", add_special_tokens=False, **arguments
            )
        except MediaError:
            raise
        except Exception as err:  # processors raise anything, even a bare StopIteration
            all_media = sum((media for _, media in prompts), Media())
            raise ValueError(
                f"{first_line(err)} (the processor of {self.family.model_type}, of "
                f"{all_media.counts})"
            ) from err
        return outputs

    def _is_of_media(self, name: str) -> bool:
        """Return whether an output of the processor is an input of the model beside tokens."""
        if name in (*_TEXT_INPUTS, self.family.token_types):
            return False
        return self.family.inputs is None or name in self.family.inputs

    def _arguments(self, prompts: Sequence[tuple[str, Media]]) -> dict[str, object]:
        """Return the processor's arguments: texts and decoded media of the prompts."""
        arguments: dict[str, object] = {"text": [text for text, _ in prompts]}
        if len(prompts) > 1:
            arguments["padding"] = True
        for text, media in prompts:
            self.check_places(text, media)
            for kind in media.kinds:
                decoded = [medium.decode() for medium in media[kind]]
                media_arguments = MEDIA_KINDS[kind].arguments(decoded)
                if kind == "image" and not self._nests:
                    media_arguments = {"images": decoded}
                for name, value in media_arguments.items():
                    before = arguments.get(name)
                    if isinstance(before, list) and isinstance(value, list):
                        value = [*before, *value]
                    arguments[name] = value
        return arguments

    def tokens(self, text: str, media: Media) -> PromptTokens:
        """Return the tokens of `encode`, reading only the headers of images where that suffices.

        Args:
            text, media: Prompt as in `encode`.

        Raises:
            MediaError: A medium cannot be read, or its file is cut off.
            ValueError: As in `encode`.
        """
        token_ids = self._measured(text, media)
        if token_ids is None:
            encoded = self.encode(text, media)
            return PromptTokens(encoded.token_ids, encoded.request_token_ids, encoded.kinds)
        return PromptTokens(token_ids, self._text_ids(text), frozenset(media.kinds))

    def _measured(self, text: str, media: Media) -> tuple[int, ...] | None:
        """Return the token ids from the headers of images; None if pixels are needed."""
        self.check_places(text, media)
        if media.kinds != ("image",) or self.family.size_facts is None:
            return None
        sizes = [image.whole_size() for image in media.images]
        facts = self.family.size_facts(self.processor, sizes)
        if facts is None:
            return None
        places = text.split(self.marks["image"])
        shown = [self.processor.replace_image_token(facts, i) for i in range(len(sizes))]
        return self._text_ids("".join(chain(*zip(places, shown, strict=False), places[-1:])))

    def _text_ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, ignoring its media."""
        return tuple(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def marks(self) -> dict[MediumKind, str]:
        """Placeholder of a medium in texts, by kind."""
        attributes = vars(self.processor)
        marks = {
            kind: str(attributes[name])
            for kind, name in self.family.marks.items()
            if name in attributes
        }
        if self.family.inputs is None or "image" not in marks:
            return marks
        # Some chat templates write another token, in whose place the processor puts the features'.
        text = self._rendered("image", 1)
        tokens = (value for name, value in attributes.items() if name.endswith("_token"))
        shown = [mark for mark in (marks["image"], *tokens) if text.count(str(mark)) == 1]
        return {"image": str([*shown, marks["image"]][0])}

    @cached_property
    def placeholders(self) -> frozenset[str]:
        """Tokens that data must not contain: the model expects a medium for each."""
        named = self.family.soft_marks
        soft = (str(self.processor.tokenizer.special_tokens_map[name]) for name in named)
        return frozenset((*self.marks.values(), *soft))

    def check_places(self, text: str, media: Media) -> None:
        """Raise a ValueError unless a text has one place for each medium, all of known kinds."""
        for kind in media.kinds:
            if kind not in self.family.reads:
                plural = MEDIA_KINDS[kind].plural
                raise ValueError(
                    f"models of type {self.family.model_type} read no {plural}: expected "
                    f"{', '.join(sorted(self.family.reads))}; leave media out with --text_only"
                )
        for kind, mark in self.marks.items():
            places, count = text.count(mark), len(media[kind])
            if places != count:
                raise ValueError(
                    f"the text has {places} places {mark} and the prompt {count} "
                    f"{MEDIA_KINDS[kind].plural}: expected one place for each"
                )

    def _check_features(self, encoded: EncodedPrompt, places: int) -> None:
        """Raise a ValueError unless each of the placeholder tokens has its feature."""
        features = 0
        if encoded.kinds:
            count = self.family.num_features  # without one the model counts its own
            features = count(self.processor, encoded.tensors) if count else max(1, places)
        if places != features:
            raise ValueError(
                f"the processor of {self.family.model_type} gave {features} features and {places} "
                f"places for {encoded.media.counts}: expected one place for each feature; load the "
                "processor that was saved with the model"
            )

    def _places(self, encoded: EncodedPrompt) -> list[int]:
        """Return the places of the tokens that stand for a feature."""
        ids = self.family.places
        if not ids and encoded.token_types is not None:
            return [place for place, kind in enumerate(encoded.token_types) if kind > 0]
        known = vars(self.processor)
        names = ("image_token_id", "video_token_id", "audio_token_id")
        ids = ids or tuple(known[name] for name in names if name in known)
        return [place for place, token in enumerate(encoded.token_ids) if token in ids]

    def ends_with_text(self, text: str) -> bool:
        """Return whether text follows the last medium, which engines require."""
        return not text.endswith(tuple(self.marks.values()))

    def _sizes(self) -> dict[str, dict[str, object]]:
        """Return the processor's size bounds, for families whose images keep their sizes."""
        if not self.family.has_axes:
            return {}
        parts = {"images_kwargs": "image_processor", "videos_kwargs": "video_processor"}
        known = vars(self.processor)
        sizes = {name: known[part].size for name, part in parts.items() if part in known}
        return {name: {"size": dict(size)} for name, size in sizes.items() if size is not None}

    def fitted(self, media: Media, bounds: "MediaBounds") -> Media:
        """Return the media as the model takes them: frames within bounds, sounds at its rate."""
        sounds = None
        if "audio" in self.family.reads:
            extractor = self.processor.feature_extractor
            sounds = SoundRules(
                int(extractor.sampling_rate), extractor.n_samples / extractor.sampling_rate
            )
        return media.by_rules(self.frame_rules(bounds), sounds)

    def frame_rules(self, bounds: "MediaBounds") -> FrameRules:
        """Return rules for frames and sizes of videos that the processor leaves unchanged."""
        multiple = fewest = 1
        if self.family.has_axes and "video" in self.family.reads:
            frames = self.processor.video_processor
            multiple = int(frames.patch_size) * int(frames.merge_size)
            fewest = int(frames.temporal_patch_size)
        return FrameRules(
            bounds.video_fps,
            bounds.video_max_frames,
            bounds.max_pixels,
            bounds.min_pixels,
            multiple,
            fewest,
        )

    def kept(self, text: str, media: Media) -> EncodedPrompt:
        """Encode a prompt once; return the same object for it until `forget`."""
        key = _key(text, media)
        if key not in self._kept:
            self._kept[key] = self.encode(text, media)
        return self._kept[key]

    def kept_all(self, prompts: Sequence[tuple[str, Media]]) -> list[EncodedPrompt]:
        """Return `kept` of each prompt, with one processor call for all where possible.

        A call for many prompts costs hardly more than a call for one. Prompts get separate calls
        if they have videos or several kinds of media, if the family's inputs cannot be split by
        prompt, or if one prompt is invalid.
        """
        new = {_key(text, media): (text, media) for text, media in prompts}
        new = {key: prompt for key, prompt in new.items() if key not in self._kept}
        kinds = {media.kinds for _, media in new.values()}
        if self._splits and len(new) > 1 and kinds in ({("image",)}, {("audio",)}):
            together: list[EncodedPrompt] = []
            # The separate call names the prompt and its problem.
            with suppress(ValueError):
                together = self._encoded([*new.values()])
            self._kept |= dict(zip(new, together, strict=False))
            self._splits = bool(together)
        return [self.kept(text, media) for text, media in prompts]

    def row(
        self, token_ids: Sequence[int], prompt: EncodedPrompt | None, later: Sequence[LaterImages]
    ) -> EncodedPrompt | None:
        """Return a row up to its last image, without encoding its earlier parts again.

        Args:
            token_ids: Tokens of the row.
            prompt: Encoded prompt at its start; None for a prompt of text only.
            later: Images behind the prompt, in order.

        Raises:
            ValueError: The row's tokens differ from those of the prompt or an image.
        """
        if not later:
            return prompt
        pieces = [] if prompt is None else [(0, 0, prompt)]
        pieces += [(x.start, x.num_skipped, self.kept(x.text, x.media)) for x in later]
        request: list[int] = []
        types: list[int] = []
        spans: list[MediaSpan] = []
        place = 0
        for start, skipped, piece in pieces:
            ids, stop = piece.token_ids[skipped:], start + len(piece.token_ids) - skipped
            if tuple(token_ids[start:stop]) != ids:
                raise ValueError(
                    f"a row has other tokens at {start}:{stop} than the {len(ids)} that its images "
                    "are encoded as; images of a row must stay as they were first shown"
                )
            request += [*token_ids[place:start], *piece.request_token_ids[skipped:]]
            types += [0] * (start - place)
            types += (piece.token_types or (0,) * len(piece.token_ids))[skipped:]
            moved = start - skipped
            spans += (MediaSpan(x.start + moved, x.stop + moved, x.tensors) for x in piece.spans)
            place = stop
        encoded = [piece for _, _, piece in pieces]
        return replace(
            encoded[-1],
            token_ids=tuple(token_ids[:place]),
            request_token_ids=tuple(request),
            token_types=None if self.family.token_types is None else tuple(types),
            tensors=self.family.joined([piece.tensors for piece in encoded], self.axes),
            kinds=frozenset(kind for piece in encoded for kind in piece.kinds),
            media=sum((piece.media for piece in encoded), Media()),
            spans=tuple(spans),
        )

    def num_places(self, text: str) -> int:
        """Return the number of image placeholders in a rendered text."""
        return text.count(self.marks["image"]) if "image" in self.marks else 0

    @property
    def num_kept(self) -> int:
        """Number of prompts whose tensors are kept."""
        return len(self._kept)

    def bytes_since(self, number: int) -> int:
        """Return the bytes of the kept prompts after the first `number`."""
        return sum(encoded.num_bytes for encoded in [*self._kept.values()][number:])

    def forget(self, number: int = 0) -> None:
        """Free the tensors of all prompts after the first `number`."""
        for key in [*self._kept][number:]:
            del self._kept[key]


def _key(text: str, media: Media) -> tuple[str, ...]:
    """Return a key that identifies a prompt."""
    return (text, *(medium.digest for medium in media))


class MediaReader:
    """Encoder of an engine's model, whose processor is loaded on first use.

    Args:
        model_path: Directory of a Hugging Face checkpoint.
        engine_name: Name of the engine, for messages.
        bounds: Bounds of the media.
    """

    def __init__(self, model_path: str, engine_name: str, bounds: "MediaBounds") -> None:
        self._model_path = model_path
        self._bounds = bounds
        self._engine_name = engine_name
        self._encoder: PromptEncoder | None = None

    def encode(self, request: "GenerationRequest") -> EncodedPrompt:
        """Encode a request's prompt with its media.

        Raises:
            FileNotFoundError: There is no processor.
            ValueError: The request has no text, or a medium cannot be read.
        """
        name = f"request {request.request_id}"
        if not request.prompt_text:
            raise ValueError(
                f"{name} has images or videos and no prompt_text: the processor needs the text "
                "with one placeholder for each medium"
            )
        media = {
            kind: [
                MEDIA_KINDS[kind].read(value, name=f"{kind} {i} of {name}", folder=Path())
                for i, value in enumerate(values, start=1)
            ]
            for kind, values in request.multi_modal.by_kind.items()
        }
        encoder = self._loaded()
        try:
            fitted = encoder.fitted(Media(media), self._bounds)
            encoded = encoder.encode(request.prompt_text, fitted)
        except MediaError:
            raise
        except ValueError as err:
            raise ValueError(f"{name}: {err}") from err
        if not encoder.ends_with_text(request.prompt_text):
            raise ValueError(f"{name} ends with a medium: put text behind it")
        return encoded

    def _loaded(self) -> PromptEncoder:
        if self._encoder is None:
            if not self._model_path or not Path(self._model_path).is_dir():
                raise FileNotFoundError(
                    f"images need the processor of the model, and {self._model_path!r} is not a "
                    f"directory; give the {self._engine_name} engine a model_path, or requests "
                    "that are encoded"
                )
            from transformers import AutoConfig, AutoProcessor

            options = {"local_files_only": True, "trust_remote_code": False}
            config = AutoConfig.from_pretrained(self._model_path, **options)
            family = family_of(config)
            if family is None or not family.reads:
                raise ValueError(
                    f"the model in {self._model_path} reads text only: got type "
                    f"{config.model_type!r}"
                )
            processor = AutoProcessor.from_pretrained(self._model_path, **options)
            self._encoder = PromptEncoder(processor, family)
        return self._encoder

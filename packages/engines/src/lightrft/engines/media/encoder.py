"""Encoders: prompts with media as a model and an engine read them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from lightrft.engines.media.families import VisionFamily, family_of
from lightrft.engines.media.media import MEDIA_KINDS, EncodedPrompt, LaterImages, Media, MediumKind

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from lightrft.engines.types import GenerationRequest

# Inputs of text that every processor gives.
_TEXT_INPUTS = ("input_ids", "attention_mask")


class TextEncoder:
    """The encoder of a model that reads text only: all its results are empty."""

    reads_media = False

    def kept(self, text: str, media: Media) -> EncodedPrompt:
        """Raises a ValueError: no prompt may have media."""
        raise ValueError(
            f"the prompt {text[:80]!r} has {media.counts}: the trainer needs the model's processor "
            "(processor=) and a vision-language model"
        )

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

    def forget(self) -> None:
        """Does nothing: see `PromptEncoder`."""


TEXT_ENCODER = TextEncoder()


class PromptEncoder:
    """Calls a processor once for each prompt.

    Args:
        processor: Of the model.
        family: Of the model.
    """

    reads_media = True

    def __init__(self, processor: "ProcessorMixin", family: VisionFamily) -> None:
        self.processor = processor
        self.family = family
        self._kept: dict[tuple[str, ...], EncodedPrompt] = {}

    def encode(self, text: str, media: Media) -> EncodedPrompt:
        """One prompt.

        Args:
            text: With one placeholder for each medium, as the chat template writes it.
            media: In order of appearance.

        Raises:
            MediaError: A medium cannot be read.
            ValueError: The family reads no such media, or text and media do not agree.
        """
        arguments: dict[str, object] = {}
        for kind in media.kinds:
            row = MEDIA_KINDS[kind]
            arguments |= row.arguments([medium.decode() for medium in media[kind]])
            if kind not in self.family.reads:
                raise ValueError(f"models of type {self.family.model_type} read no {row.plural}")
        found: Mapping[str, Tensor] = self.processor(
            text=[text], return_tensors="pt", add_special_tokens=False, **arguments
        )
        types = self.family.token_types
        if types is not None and types not in found:
            raise ValueError(
                f"the processor of {self.family.model_type} gave no {types}: positions and masks "
                "of images follow from it; load the processor that was saved with the model"
            )
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        tensors = {
            name: value for name, value in found.items() if name not in (*_TEXT_INPUTS, types)
        }
        kinds: set[MediumKind] = {
            kind for kind, pixels in self.family.kinds.items() if pixels in tensors
        }
        return EncodedPrompt(
            token_ids=tuple(found["input_ids"][0].tolist()),
            request_token_ids=tuple(ids),
            token_types=None if types is None else tuple(found[types][0].tolist()),
            tensors=tensors,
            kinds=frozenset(kinds),
            media=media,
            sizes=self._sizes(),
        )

    def _sizes(self) -> dict[str, dict[str, object]]:
        """Of the families whose images keep their sizes, within bounds that options move."""
        if not self.family.has_axes:
            return {}
        return {"images_kwargs": {"size": dict(self.processor.image_processor.size)}}

    def kept(self, text: str, media: Media) -> EncodedPrompt:
        """Like `encode`, and the same object for the same prompt until `forget`."""
        key = (text, *(medium.digest for medium in media))
        if key not in self._kept:
            self._kept[key] = self.encode(text, media)
        return self._kept[key]

    def row(
        self, token_ids: Sequence[int], prompt: EncodedPrompt | None, later: Sequence[LaterImages]
    ) -> EncodedPrompt | None:
        """A row up to its last image: nothing of it is encoded again, new images stand behind.

        Args:
            token_ids: Of the row.
            prompt: With which it begins; None for one of text.
            later: Images behind the prompt, in their order.

        Raises:
            ValueError: The row has other tokens where the prompt or an image belongs.
        """
        if not later:
            return prompt
        pieces = [] if prompt is None else [(0, 0, prompt)]
        pieces += [(x.start, x.num_skipped, self.kept(x.text, x.media)) for x in later]
        request: list[int] = []
        types: list[int] = []
        place = 0
        for start, skipped, piece in pieces:
            own, stop = piece.token_ids[skipped:], start + len(piece.token_ids) - skipped
            if tuple(token_ids[start:stop]) != own:
                raise ValueError(
                    f"a row has other tokens at {start}:{stop} than the {len(own)} that its images "
                    "are encoded as; images of a row must stay as they were first shown"
                )
            request += [*token_ids[place:start], *piece.request_token_ids[skipped:]]
            types += [0] * (start - place)
            types += (piece.token_types or (0,) * len(piece.token_ids))[skipped:]
            place = stop
        found = [piece for _, _, piece in pieces]
        return replace(
            found[-1],
            token_ids=tuple(token_ids[:place]),
            request_token_ids=tuple(request),
            token_types=None if self.family.token_types is None else tuple(types),
            tensors=self._joined([piece.tensors for piece in found]),
            kinds=frozenset(kind for piece in found for kind in piece.kinds),
            media=sum((piece.media for piece in found), Media()),
        )

    def _joined(self, given: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        names = dict.fromkeys(name for tensors in given for name in tensors)
        return {n: self.family.join(n, [tensors.get(n) for tensors in given]) for n in names}

    def num_places(self, text: str) -> int:
        """Number of images that a rendered text has places for."""
        return text.count(str(vars(self.processor)[self.family.image_mark]))

    def forget(self) -> None:
        """Frees the tensors of all prompts."""
        self._kept.clear()


Encoder: TypeAlias = TextEncoder | PromptEncoder


class MediaReader:
    """The encoder of an engine's own model, whose processor is loaded when it is first needed.

    Args:
        model_path: Directory of a Hugging Face checkpoint.
        engine_name: For messages.
    """

    def __init__(self, model_path: str, engine_name: str) -> None:
        self._model_path = model_path
        self._engine_name = engine_name
        self._encoder: PromptEncoder | None = None

    def encode(self, request: "GenerationRequest") -> EncodedPrompt:
        """A request's prompt with its media.

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
                for i, value in enumerate(given, start=1)
            ]
            for kind, given in request.multi_modal.by_kind.items()
        }
        return self._loaded().encode(request.prompt_text, Media(media))

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
            if family is None:
                raise ValueError(
                    f"the model in {self._model_path} reads text only: got type "
                    f"{config.model_type!r}"
                )
            processor = AutoProcessor.from_pretrained(self._model_path, **options)
            self._encoder = PromptEncoder(processor, family)
        return self._encoder

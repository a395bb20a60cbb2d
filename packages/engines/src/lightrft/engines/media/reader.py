"""The processor of an engine's own model, for prompts that come as text with raw media."""

from pathlib import Path

from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import family_of
from lightrft.engines.media.kinds import MEDIA_KINDS, Media
from lightrft.engines.media.prompts import EncodedPrompt
from lightrft.engines.types import GenerationRequest


class MediaReader:
    """Loads the processor when it is first needed.

    Args:
        model_path: Directory of a Hugging Face checkpoint.
        engine_name: For messages.
    """

    def __init__(self, model_path: str, engine_name: str) -> None:
        self._model_path = model_path
        self._engine_name = engine_name
        self._encoder: PromptEncoder | None = None

    def encode(self, request: GenerationRequest) -> EncodedPrompt:
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

"""The tokenizer of a checkpoint, for stop strings and prompts given as text."""

from pathlib import Path


class Text:
    """A tokenizer that is loaded when it is first needed.

    Args:
        model_path: Directory of a Hugging Face checkpoint.
    """

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._loaded: object | None = None

    @property
    def _tokenizer(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
        if self._loaded is None:
            if not self._model_path or not Path(self._model_path).is_dir():
                raise FileNotFoundError(
                    "stop strings and prompts given as text need a tokenizer, and "
                    f"{self._model_path!r} is not a directory; set model_path to a checkpoint, or "
                    "use stop_token_ids and prompt_token_ids"
                )
            from transformers import AutoTokenizer

            self._loaded = AutoTokenizer.from_pretrained(
                self._model_path, local_files_only=True, trust_remote_code=False
            )
        return self._loaded

    def load(self) -> None:
        """Loads the tokenizer now, so that a missing one is reported before any work."""
        _ = self._tokenizer

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones included, with spaces as they are."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """The token ids of a text that already holds its special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

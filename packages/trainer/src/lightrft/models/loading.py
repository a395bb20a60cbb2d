"""Reads and writes Hugging Face checkpoints, with errors that fit one line."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightrft.engines.process_state import deepspeed_unless_used
from lightrft.strategy.meta_init import is_building_on_meta
from lightrft.utils.hub import is_hub_reachable

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


class ModelLoadError(OSError):
    """A checkpoint is missing or cannot be read; the message names the path and the remedy."""


# transformers does not check a JSON file's structure before it uses it.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


def load_config(path: str) -> PretrainedConfig:
    """The model's configuration.

    Raises:
        ModelLoadError: There is no config.json, or it names an unknown architecture.
    """
    config: PretrainedConfig = _read(AutoConfig, path, ("config.json",), "configuration")
    return config


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint.

    Raises:
        ModelLoadError: It is missing or unreadable.
    """
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    tokenizer: PreTrainedTokenizerBase = _read(AutoTokenizer, path, files, "tokenizer")
    return tokenizer


def _read(
    auto_class: type[AutoConfig] | type[AutoTokenizer],
    path: str,
    patterns: tuple[str, ...],
    what: str,
) -> object:
    _require(path, patterns, what)
    try:
        return auto_class.from_pretrained(path, local_files_only=_only_local(path))
    except _UNREADABLE as err:
        raise ModelLoadError(f"cannot read the {what} of {path!r}: {_first_line(err)}") from err


def load_causal_lm(path: str, *, dtype: str = "float32") -> PreTrainedModel:
    """A language model with its output projection.

    Args:
        path: Directory of a checkpoint, or a model id of the Hugging Face hub.
        dtype: A key of `DTYPES`.

    Raises:
        ModelLoadError: Configuration or weights are missing or unreadable.
        ValueError: The dtype is unknown.
    """
    return _load(AutoModelForCausalLM, path, dtype)


def load_trunk(path: str, *, dtype: str = "float32") -> PreTrainedModel:
    """A model up to its last hidden states; arguments and errors as for `load_causal_lm`."""
    return _load(AutoModel, path, dtype)


def save_pretrained(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: str | Path
) -> None:
    """Writes config, weights and, if given, the tokenizer as one checkpoint directory."""
    with deepspeed_unless_used():
        model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in `DTYPES`."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _load(
    auto_class: type[AutoModel] | type[AutoModelForCausalLM], path: str, dtype: str
) -> PreTrainedModel:
    options = {"dtype": parse_dtype(dtype), "attn_implementation": "sdpa"}
    config = load_config(path)
    _require(path, WEIGHT_PATTERNS, "weights")
    if is_building_on_meta():
        # The strategy reads the weights from the configuration's directory, shard by shard.
        return auto_class.from_config(config, **options)
    try:
        return auto_class.from_pretrained(path, local_files_only=_only_local(path), **options)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as err:
        raise ModelLoadError(f"cannot load the model {path!r}: {_first_line(err)}") from err


def _only_local(path: str) -> bool:
    """Whether only files of this machine can be had; asks the hub only about its own names."""
    return Path(path).is_dir() or not is_hub_reachable()


def _require(path: str, patterns: tuple[str, ...], what: str) -> None:
    """Checks a local directory; a path that looks like a hub id is left to transformers."""
    directory = Path(path)
    if not directory.is_dir():
        is_hub_id = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
        if is_hub_id and not directory.exists():
            return
        raise ModelLoadError(f"no model directory at {path!r}: expected a Hugging Face checkpoint")
    if not any(any(directory.glob(pattern)) for pattern in patterns):
        raise ModelLoadError(
            f"no {what} in {path!r}: expected {' or '.join(patterns)}; is it a complete Hugging "
            "Face checkpoint?"
        )


def _first_line(err: Exception) -> str:
    lines = str(err).strip().splitlines()
    return lines[0] if lines else type(err).__name__

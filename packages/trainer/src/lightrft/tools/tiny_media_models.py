"""Tiny random models that read images, videos or sounds, with their processors."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers as hf

from lightrft.config.files import typed
from lightrft.config.toml import read_toml
from lightrft.tools.model_presets import END, PAD, SYSTEM, byte_level_core, save_checked

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

_TEMPLATE = (
    "{{% for message in messages %}}{{{{ '<|' + message['role'] + '|>' }}}}"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}{{% if part['type'] == 'text' %}}{{{{ part['text'] }}}}"
    "{media}{{% endif %}}{{% endfor %}}{{% endif %}}"
    "{{% if message['role'] == 'assistant' %}}{{{{ eos_token }}}}{{% endif %}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
)
_MEDIUM = "{{% elif part['type'] == '{kind}' %}}{text}"


@dataclass(frozen=True, slots=True)
class MediaPreset:
    """A model of `tiny_media_models.toml`.

    Args:
        model_type: Kind of the model.
        processor: Class of its processor.
        marks: Special tokens of media.
        shown: What stands for each kind of medium in the chat template.
        ids: Marks whose ids the configuration has, by its fields.
        config: Other fields of the configuration.
        parts: Parts of the processor: their class (`kind`) and its arguments.
    """

    model_type: str
    processor: str
    marks: tuple[str, ...]
    shown: Mapping[str, str]
    ids: Mapping[str, str]
    config: Mapping[str, object]
    parts: Mapping[str, Mapping[str, object]]


_FILE = Path(__file__).with_suffix(".toml")
MEDIA_PRESETS = typed(dict[str, MediaPreset], read_toml(_FILE), _FILE)


def build_tiny(
    preset: str,
    *,
    seed: int = 0,
    initializer_range: float = 0.1,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    seconds: int | None = None,
) -> "tuple[PreTrainedModel, ProcessorMixin]":
    """Return a random float32 model and its processor.

    Args:
        preset: Key of `MEDIA_PRESETS`.
        seed: Seed of the weights.
        initializer_range: Standard deviation of the weights.
        tokenizer: Tokenizer with the preset's marks; None for one token per byte.
        seconds: Longest sound of a model that hears; None is the preset's.
    """
    table = MEDIA_PRESETS[preset]
    tokenizer = tokenizer or marked_tokenizer(table.marks)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    fields, parts = copy.deepcopy(dict(table.config)), {n: dict(p) for n, p in table.parts.items()}
    towers = [field for field in fields.values() if isinstance(field, dict)]
    for tower in towers:
        tower["initializer_range"] = initializer_range
    towers[0] |= {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id, **ends}
    if seconds is not None:
        towers[1]["max_source_positions"] = 50 * seconds
        parts["feature_extractor"]["chunk_length"] = seconds
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in table.ids.items()}
    config = hf.AutoConfig.for_model(table.model_type, **fields, **ids, **ends)
    made = {name: getattr(hf, str(part.pop("kind")))(**part) for name, part in parts.items()}
    processor = getattr(hf, table.processor)(
        **made, tokenizer=tokenizer, chat_template=media_template(table.shown)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    return model, processor


def media_template(shown: Mapping[str, str]) -> str:
    """Return a chat template.

    Args:
        shown: What stands for each kind of medium.
    """
    media = "".join(_MEDIUM.format(kind=kind, text=text) for kind, text in shown.items())
    return _TEMPLATE.format(media=media)


def marked_tokenizer(marks: Sequence[str]) -> "PreTrainedTokenizerBase":
    """Return a tokenizer with one token per byte, and marks of media after them."""
    core = byte_level_core()
    core.add_special_tokens(list(marks))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        bos_token=SYSTEM,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def write_tiny_media_model(directory: str | Path, preset: str, seed: int = 0) -> None:
    """Write a random float32 model with its processor as a Hugging Face checkpoint.

    Args:
        directory: Output folder, created if it does not exist.
        preset: Key of `MEDIA_PRESETS`.
        seed: Seed of the weights.

    Raises:
        RuntimeError: The processor does not survive being saved and loaded.
    """
    model, processor = build_tiny(preset, seed=seed)
    sample = f"{next(iter(MEDIA_PRESETS[preset].shown.values()))}é 4+3?{END}"
    save_checked(model, processor.tokenizer, directory, sample=sample, processor=processor)

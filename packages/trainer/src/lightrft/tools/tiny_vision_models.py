"""A tiny random vision-language model with its processor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer

from lightrft.models.loading import load_processor, save_pretrained
from lightrft.tools.model_presets import END, PAD, SYSTEM, byte_level_core

if TYPE_CHECKING:
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

_TEMPLATE = (
    "{{% for message in messages %}}{{{{ '<|' + message['role'] + '|>' }}}}"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}{{% if part['type'] == 'image' %}}{image}"
    "{{% elif part['type'] == 'video' %}}{video}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}"
    "{{% if message['role'] == 'assistant' %}}{{{{ eos_token }}}}{{% endif %}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
)
QWEN_MARKS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
Ids = Mapping[str, int]
Parts = tuple["PretrainedConfig", "Callable[..., ProcessorMixin]"]


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """Parts of the tiny model of a family.

    Args:
        marks: Special tokens of media.
        build: From the marks' ids, the text settings and the tokenizer to the configuration and
            the processor, which gets the chat template.
        image, video: What stands for a medium in the chat template; no video where the family
            reads none.
        named: Attributes of the tokenizer by which its processor finds the marks.
        words: Further tokens that implementations look up.
    """

    marks: tuple[str, ...]
    build: "Callable[[Ids, dict[str, object], PreTrainedTokenizerBase], Parts]"
    image: str
    video: str = ""
    named: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def qwen_ids(ids: Ids) -> dict[str, object]:
    """The ids of the marks, by the names of the Qwen configurations."""
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }


PIXELS = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}


def qwen_processor(
    kind: "type[ProcessorMixin]", tokenizer: "PreTrainedTokenizerBase"
) -> "Callable[..., ProcessorMixin]":
    """A function that makes a processor of a chat template."""
    return lambda template: kind(
        image_processor=hf.Qwen2VLImageProcessor(**PIXELS),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(**PIXELS),
        chat_template=template,
    )


def _qwen2_5_vl(ids: Ids, text: dict[str, object], tokenizer: "PreTrainedTokenizerBase") -> Parts:
    config = hf.Qwen2_5_VLConfig(
        text_config=text
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 6, 6],
            }
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 128,
            "out_hidden_size": 128,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        **qwen_ids(ids),
    )
    return config, qwen_processor(hf.Qwen2_5_VLProcessor, tokenizer)


TINY_VISION = TinyFamily(
    QWEN_MARKS,
    _qwen2_5_vl,
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
)


def build_tiny(
    family: TinyFamily,
    *,
    seed: int = 0,
    initializer_range: float = 0.1,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> "tuple[PreTrainedModel, ProcessorMixin]":
    """A random float32 model of a family, and its processor.

    Args:
        family: Of the model.
        seed: Fixes the weights.
        initializer_range: Standard deviation of the weights.
        tokenizer: With the family's marks; None for one token per byte.
    """
    tokenizer = tokenizer or _tokenizer(family)
    ids = dict(zip(family.marks, tokenizer.convert_tokens_to_ids(list(family.marks)), strict=True))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": initializer_range,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config, build_processor = family.build(ids, text, tokenizer)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.vision_config.initializer_range = initializer_range
    processor = build_processor(_TEMPLATE.format(image=family.image, video=family.video))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return model, processor


def _tokenizer(family: TinyFamily) -> "PreTrainedTokenizerBase":
    core: Tokenizer = byte_level_core()
    core.add_tokens([AddedToken(word, normalized=False) for word in family.words])
    core.add_special_tokens(list(family.marks))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        bos_token=SYSTEM,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": dict(family.named)} if family.named else {}),
    )


def write_tiny_vision_model(
    directory: str | Path, family: TinyFamily, seed: int = 0, *, initializer_range: float = 0.1
) -> None:
    """Writes a random float32 model with its processor as a Hugging Face checkpoint.

    Args:
        directory: Created if it does not exist.
        family, seed, initializer_range: See `build_tiny`.

    Raises:
        RuntimeError: The processor does not survive being saved and loaded.
    """
    model, processor = build_tiny(family, seed=seed, initializer_range=initializer_range)
    save_vision_model(model, processor, directory, sample=family.image + f"é 4+3?{END}")


def save_vision_model(
    model: "PreTrainedModel", processor: "ProcessorMixin", directory: str | Path, *, sample: str
) -> None:
    """Writes a checkpoint and reads its processor back.

    Raises:
        RuntimeError: The loaded processor reads `sample` in another way.
    """
    save_pretrained(model, None, directory)
    processor.save_pretrained(directory)
    expected = processor.tokenizer(sample)["input_ids"]
    loaded = load_processor(str(directory)).tokenizer(sample)["input_ids"]
    if loaded != expected:
        raise RuntimeError(
            f"the processor saved in {directory} does not survive loading: got {loaded}, expected "
            f"{expected}; check the version of transformers"
        )

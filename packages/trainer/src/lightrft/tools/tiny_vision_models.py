"""A tiny random Qwen2.5-VL with its processor."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers as hf

from lightrft.tools.model_presets import END, PAD, SYSTEM, byte_level_core, save_checked

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

TEMPLATE = (
    "{{% for message in messages %}}{{{{ '<|' + message['role'] + '|>' }}}}"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}{{% if part['type'] == 'image' %}}{image}"
    "{{% elif part['type'] == 'video' %}}{video}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}"
    "{{% if message['role'] == 'assistant' %}}{{{{ eos_token }}}}{{% endif %}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
)
MARKS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IMAGE, VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
PIXELS = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}


def build_tiny(
    *,
    seed: int = 0,
    initializer_range: float = 0.1,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> "tuple[PreTrainedModel, ProcessorMixin]":
    """Return a random float32 model and its processor.

    Args:
        seed: Seed of the weights.
        initializer_range: Standard deviation of the weights.
        tokenizer: Tokenizer with the `MARKS`; None for one token per byte.
    """
    tokenizer = tokenizer or marked_tokenizer(MARKS)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    ids = dict(zip(MARKS, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    config = hf.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "initializer_range": initializer_range,
            "bos_token_id": tokenizer.bos_token_id,
            "rope_parameters": dict(ROPE),
            **ends,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 128,
            "out_hidden_size": 128,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "initializer_range": initializer_range,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        **ends,
    )
    processor = hf.Qwen2_5_VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**PIXELS),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(**PIXELS),
        chat_template=TEMPLATE.format(image=IMAGE, video=VIDEO),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return model, processor


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


def write_tiny_vision_model(directory: str | Path, seed: int = 0) -> None:
    """Write a random float32 model with its processor as a Hugging Face checkpoint.

    Args:
        directory: Output folder, created if it does not exist.
        seed: Seed of the weights.

    Raises:
        RuntimeError: The processor does not survive being saved and loaded.
    """
    model, processor = build_tiny(seed=seed)
    sample = IMAGE + f"é 4+3?{END}"
    save_checked(model, processor.tokenizer, directory, sample=sample, processor=processor)

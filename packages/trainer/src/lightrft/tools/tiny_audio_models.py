"""A tiny random Qwen2-Audio with its processor."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers as hf

from lightrft.tools.model_presets import END, save_checked
from lightrft.tools.tiny_vision_models import TEMPLATE, marked_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

MARKS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
SOUND = "".join(MARKS)
CHAT_TEMPLATE = TEMPLATE.replace("'image'", "'audio'").format(image=SOUND, video="")
RATE, HOP, NUM_BANDS = 16_000, 160, 32


def build_tiny(
    *,
    seed: int = 0,
    initializer_range: float = 0.1,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    seconds: int = 2,
) -> "tuple[PreTrainedModel, ProcessorMixin]":
    """Return a random float32 model and its processor.

    Args:
        seed: Seed of the weights.
        initializer_range: Standard deviation of the weights.
        tokenizer: Tokenizer with the `MARKS`; None for one token per byte.
        seconds: Longest sound; one second is 25 tokens.
    """
    tokenizer = tokenizer or marked_tokenizer(MARKS)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = hf.Qwen2AudioConfig(
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "initializer_range": initializer_range,
            "bos_token_id": tokenizer.bos_token_id,
            "tie_word_embeddings": False,
            **ends,
        },
        audio_config={
            "num_mel_bins": NUM_BANDS,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "max_source_positions": seconds * RATE // HOP // 2,
            "initializer_range": initializer_range,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        **ends,
    )
    processor = hf.Qwen2AudioProcessor(
        feature_extractor=hf.WhisperFeatureExtractor(
            feature_size=NUM_BANDS, sampling_rate=RATE, hop_length=HOP, chunk_length=seconds
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    return model, processor


def write_tiny_audio_model(directory: str | Path, seed: int = 0) -> None:
    """Write a random float32 model with its processor as a Hugging Face checkpoint.

    Args:
        directory: Output folder, created if it does not exist.
        seed: Seed of the weights.

    Raises:
        RuntimeError: The processor does not survive being saved and loaded.
    """
    model, processor = build_tiny(seed=seed)
    sample = SOUND + f"é 4+3?{END}"
    save_checked(model, processor.tokenizer, directory, sample=sample, processor=processor)

"""Tiny random models and their tokenizer, for tests and first steps."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen3Config,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lightrft.models.loading import load_processor, save_pretrained

PAD, END, USER, ASSISTANT, SYSTEM = (
    "<|pad|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
SPECIAL_TOKENS = (PAD, END, USER, ASSISTANT, SYSTEM)
NUM_BYTES = 256
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _tiny_config(kind: type[PretrainedConfig], *, is_tied: bool) -> PretrainedConfig:
    """Two layers; `is_tied` makes the input embedding the output projection."""
    return kind(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=192,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=is_tied,
    )


PRESETS: dict[str, Callable[..., PretrainedConfig]] = {
    "tiny-llama": partial(_tiny_config, LlamaConfig, is_tied=True),
    "tiny-qwen3": partial(_tiny_config, Qwen3Config, is_tied=False),
}


def byte_level_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte, with the byte's value as its id, and five special tokens after them."""
    return chat_tokenizer(byte_level_core(), [USER, ASSISTANT, SYSTEM])


def byte_level_core() -> Tokenizer:
    """The part of `byte_level_tokenizer` that splits and joins texts."""
    vocabulary = {symbol: value for value, symbol in bytes_to_unicode().items()}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    return core


def chat_tokenizer(
    core: Tokenizer, roles: Sequence[str], *, unk_token: str | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer with `CHAT_TEMPLATE`, whose vocabulary has its marks.

    Args:
        core: Splits and joins texts.
        roles: Marks of the roles.
        unk_token: Stands for what is not in the vocabulary.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=unk_token,
        additional_special_tokens=list(roles),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def random_model(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """A causal language model in float32 with random weights, which knows the tokenizer's marks."""
    config.bos_token_id = None
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write_tiny_model(directory: str | Path, preset: str, seed: int = 0) -> None:
    """Writes a random float32 model and its tokenizer as a Hugging Face checkpoint.

    Args:
        directory: Created if it does not exist.
        preset: A key of `PRESETS`.
        seed: Fixes the weights.

    Raises:
        ValueError: The preset is unknown.
        RuntimeError: The tokenizer does not survive being saved and loaded.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: expected one of {', '.join(PRESETS)}")
    tokenizer = byte_level_tokenizer()
    model = random_model(PRESETS[preset](), tokenizer, seed)
    sample = f"{SYSTEM}é ü\n{USER}  What is 4+3?\t{ASSISTANT}\\boxed{{7}}{END}"
    save_checked(model, tokenizer, directory, sample=sample)


def save_checked(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    *,
    sample: str,
    processor: ProcessorMixin | None = None,
) -> None:
    """Writes a checkpoint and reads its tokenizer, or the processor with it, back.

    Raises:
        RuntimeError: The loaded tokenizer reads or writes `sample` in another way.
    """
    save_pretrained(model, tokenizer, directory)
    expected = tokenizer(sample)["input_ids"]
    loaded = AutoTokenizer.from_pretrained(directory)
    if processor is not None:
        processor.save_pretrained(directory)
        loaded = load_processor(str(directory)).tokenizer
    token_ids = loaded(sample)["input_ids"]
    if token_ids != expected or loaded.decode(token_ids) != sample:
        raise RuntimeError(
            f"the tokenizer saved in {directory} does not survive loading: got {token_ids}, "
            f"expected {expected}; check the version of transformers"
        )

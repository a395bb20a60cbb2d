"""The tokenizer and the untrained model of the quick start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
WHOLE_TOKENS = ("<think>", "</think>", "\\boxed{")
CHARACTERS = "\n !\"'()*+,-./0123456789:=>?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz{}"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer with one token per character and for each of a few marks."""
    tokens = [PAD, END, USER, ASSISTANT, *WHOLE_TOKENS, *CHARACTERS]
    core = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="?")
    )
    core.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"</?think>|\\boxed\{|[\s\S]"), behavior="isolated"
    )
    core.decoder = decoders.Fuse()  # without it, decoding puts spaces between tokens
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token="?",
        additional_special_tokens=[USER, ASSISTANT],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PreTrainedModel:
    """A random Qwen3 of 0.27 million parameters in fp32.

    The usual initializer_range of 0.02 is too small at this width: the warm start then ends with
    mistakes that no reward can repair.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 31) // 32 * 32,
        hidden_size=128,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=192,
        max_position_embeddings=1024,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def save_pretrained(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Write a Hugging Face checkpoint and check that its tokenizer survives loading.

    Raises:
        RuntimeError: `AutoTokenizer` reads the saved tokenizer as something else.
    """
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    sample = f"{USER}What is 457+386?{ASSISTANT}<think>7+6=13</think>\\boxed{{843}}{END}"
    token_ids = tokenizer(sample)["input_ids"]
    loaded = AutoTokenizer.from_pretrained(directory)
    if loaded(sample)["input_ids"] != token_ids or loaded.decode(token_ids) != sample:
        raise RuntimeError(
            f"the tokenizer in {directory} does not survive loading by AutoTokenizer: got "
            f"{loaded(sample)['input_ids']}, expected {token_ids}; check the transformers version"
        )

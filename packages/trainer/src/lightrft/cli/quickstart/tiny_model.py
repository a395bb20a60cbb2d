"""The tokenizer and the untrained model of the quick start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from lightrft.models.loading import save_pretrained
from lightrft.models.presets import ASSISTANT, CHAT_TEMPLATE, END, PAD, USER, tiny_qwen3_config

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WHOLE_TOKENS = ("<think>", "</think>", "\\boxed{")
CHARACTERS = "\n !\"'()*+,-./0123456789:=>?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz{}"


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
    config = tiny_qwen3_config(vocab_size=(len(tokenizer) + 31) // 32 * 32, initializer_range=0.06)
    config.bos_token_id = None
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def write_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Write a Hugging Face checkpoint and check that its tokenizer survives loading.

    Raises:
        RuntimeError: `AutoTokenizer` reads the saved tokenizer as something else.
    """
    save_pretrained(model, tokenizer, directory)
    sample = f"{USER}What is 457+386?{ASSISTANT}<think>7+6=13</think>\\boxed{{843}}{END}"
    token_ids = tokenizer(sample)["input_ids"]
    loaded = AutoTokenizer.from_pretrained(directory)
    if loaded(sample)["input_ids"] != token_ids or loaded.decode(token_ids) != sample:
        raise RuntimeError(
            f"the tokenizer in {directory} does not survive loading by AutoTokenizer: got "
            f"{loaded(sample)['input_ids']}, expected {token_ids}; check the transformers version"
        )

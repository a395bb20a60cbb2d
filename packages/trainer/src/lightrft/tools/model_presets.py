"""Random models, tiny or of published shapes, and their tokenizer, for tests and measurements."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
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
    Qwen2Config,
    Qwen3Config,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lightrft.models.loading import load_processor, save_pretrained
from lightrft.tools.plan.sizes import ModelSize

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
    """Return a config of two layers; `is_tied` ties input embedding and output projection."""
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
    """Return a tokenizer with one token per byte, its value as id, then five special tokens."""
    return chat_tokenizer(byte_level_core(), [USER, ASSISTANT, SYSTEM])


def byte_level_core(num_tokens: int = VOCAB_SIZE) -> Tokenizer:
    """Return the part of `byte_level_tokenizer` that splits and joins texts.

    Args:
        num_tokens: Number of ids; those beyond bytes and marks are decoded but never encoded.
    """
    vocabulary = {symbol: value for value, symbol in bytes_to_unicode().items()}
    if num_tokens > VOCAB_SIZE:
        marks = {mark: NUM_BYTES + place for place, mark in enumerate(SPECIAL_TOKENS)}
        vocabulary |= marks | {f"Ġ{number}": number for number in range(VOCAB_SIZE, num_tokens)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    return core


def chat_tokenizer(
    core: Tokenizer, roles: Sequence[str], *, unk_token: str | None = None
) -> PreTrainedTokenizerBase:
    """Return a tokenizer with `CHAT_TEMPLATE`, whose vocabulary has its marks.

    Args:
        core: Tokenizer that splits and joins texts.
        roles: Marks of the roles.
        unk_token: Token for what is not in the vocabulary.
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
    """Return a random float32 causal language model, which knows the tokenizer's marks."""
    config.bos_token_id = None
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write_tiny_model(
    directory: str | Path, preset: str, seed: int = 0, lengths: int | None = None
) -> None:
    """Write a random float32 model and its tokenizer as a Hugging Face checkpoint.

    Args:
        directory: Output folder, created if it does not exist.
        preset: Key of `PRESETS`.
        seed: Seed of the weights.
        lengths: Mean tokens of responses; see `end_ids`.

    Raises:
        ValueError: The preset is unknown.
        RuntimeError: The tokenizer does not survive being saved and loaded.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: expected one of {', '.join(PRESETS)}")
    tokenizer = byte_level_tokenizer()
    model = random_model(PRESETS[preset](), tokenizer, seed)
    model.generation_config.eos_token_id = end_ids(VOCAB_SIZE, lengths)
    sample = f"{SYSTEM}é ü\n{USER}  What is 4+3?\t{ASSISTANT}\\boxed{{7}}{END}"
    save_checked(model, tokenizer, directory, sample=sample)


def end_ids(vocab: int, lengths: int | None) -> int | list[int]:
    """Return the ids at which responses end: one mark, or as many as a mean length asks for.

    Random weights sample all ids about alike: with k of them as ends, lengths are geometric with
    the mean vocab / k.

    Args:
        vocab: Number of ids.
        lengths: Mean tokens of a response; None is the mark alone.
    """
    end = NUM_BYTES + SPECIAL_TOKENS.index(END)
    if lengths is None:
        return end
    others = [*range(NUM_BYTES), *range(VOCAB_SIZE, vocab)]
    count = min(round(vocab / lengths) - 1, len(others))
    return sorted([end, *others[len(others) - count :]]) if count > 0 else end


def write_shape(
    directory: Path,
    size: ModelSize,
    *,
    seed: int = 0,
    lengths: int | None = None,
    shard_bytes: int = 4_000_000_000,
) -> None:
    """Write random bfloat16 weights of a published shape, shard by shard, and a tokenizer.

    Matrices are normal with the deviation that the models were initialised with, norms 1 and biases
    0. Numbers are drawn on a GPU where there is one, and differ from those of a CPU.

    Args:
        directory: Existing folder.
        size: Shape of a Qwen 2.5 or Qwen 3.
        seed: Seed of the weights.
        lengths: Mean tokens of responses; see `end_ids`.
        shard_bytes: Bytes of one file, unless one tensor has more.
    """
    tokenizer = chat_tokenizer(byte_level_core(size.vocab), [USER, ASSISTANT, SYSTEM])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(published_config(size), dtype=torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.eos_token_id = end_ids(size.vocab, lengths)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    # Tied weights are in the files once.
    weights = dict(model.named_parameters())
    shards: list[list[str]] = [[]]
    num_bytes = 0
    for name, weight in weights.items():
        if shards[-1] and num_bytes + weight.nbytes > shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(name)
        num_bytes += weight.nbytes
    files = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        tensors = {}
        for name in names:
            tensor = torch.zeros(weights[name].shape, dtype=torch.bfloat16, device=device)
            if tensor.dim() > 1:
                tensor.normal_(std=model.config.initializer_range, generator=generator)
            tensors[name] = tensor if not name.endswith("norm.weight") else tensor + 1
        save_file(tensors, directory / file, metadata={"format": "pt"})
    places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    total = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), "utf-8")


def published_config(size: ModelSize) -> PretrainedConfig:
    """Return the configuration of Qwen 2.5 or Qwen 3 in a shape."""
    kind, positions = (Qwen3Config, 40_960) if size.has_qk_norm else (Qwen2Config, 32_768)
    return kind(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        tie_word_embeddings=size.is_tied,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=NUM_BYTES + SPECIAL_TOKENS.index(END),
        pad_token_id=NUM_BYTES,
    )


def save_checked(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    *,
    sample: str,
    processor: ProcessorMixin | None = None,
) -> None:
    """Write a checkpoint and read its tokenizer, or the processor with it, back.

    Raises:
        RuntimeError: The loaded tokenizer encodes or decodes `sample` in another way.
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

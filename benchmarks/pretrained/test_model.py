"""The checkpoint holds what the GGUF file of SmolLM2-135M-Instruct holds."""

from __future__ import annotations

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

pytestmark = [pytest.mark.shard("smollm2"), pytest.mark.slow, pytest.mark.timeout(900)]

TEXTS = (
    "What is 23+45?\n\n  7 8",
    " Hello é ü\tdon't  stop 12345\n",
    "\\boxed{7} 日本語 🙂",
    "def f(x):\n    return x + 1  # 2 3\n\n\n4",
    "<|im_start|>user\n1<|im_end|>\n",
)


def fields_of(reader):
    return {name: field.contents() for name, field in reader.fields.items()}


def halves(weight, heads):
    """Rows of each head from llama.cpp's pairs to the halves of transformers."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def test_every_tensor_is_dequantised(gguf_file, smollm2):
    reader = gguf.GGUFReader(gguf_file)
    written = load_file(smollm2 / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert len(written) == len(stored) == 272
    for name, value in written.items():
        stem, suffix = name.rsplit(".", 1)
        tensor = stored[f"{names.get_name(stem)}.{suffix}"]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(value.shape)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            expected = halves(expected, 9 if "q_proj" in name else 3)
        torch.testing.assert_close(value, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_the_tokenizer_is_that_of_the_vocabulary(gguf_file, smollm2):
    """Against one built from the file's lists, with single digits as SmolLM2 learned them."""
    fields = fields_of(gguf.GGUFReader(gguf_file))
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    source = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    source.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    kinds = fields["tokenizer.ggml.token_type"]
    marks = [
        token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL
    ]
    source.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    loaded = AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        assert loaded(text)["input_ids"] == source.encode(text, add_special_tokens=False).ids
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.bos_token, loaded.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert loaded.chat_template == fields["tokenizer.chat_template"]
    assert GenerationConfig.from_pretrained(smollm2).eos_token_id == 2


def test_it_answers_in_its_chat_format_and_ends(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    produced = model.generate(**prompt, do_sample=False, max_new_tokens=48)
    answer = produced[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id

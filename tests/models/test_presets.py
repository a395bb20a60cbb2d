"""Tiny models are what their recipe says, and their tokenizer survives a round trip."""

import pytest
import torch
from safetensors.torch import load_file

from lightrft.tools.model_presets import byte_level_tokenizer, write_tiny_model


def test_every_byte_is_its_own_token_id():
    tokenizer = byte_level_tokenizer()
    text = "plain, ünïcode \u4e2d\u6587 \U0001f600\n\t\x00 two  spaces"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_the_seed_alone_fixes_the_weights(tmp_path):
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_tiny_model(tmp_path / name, "tiny-qwen3", seed)
    assert torch.equal(state, torch.get_rng_state())
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert any(not torch.equal(a[key], c[key]) for key in a)


def test_bad_presets_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="unknown preset 'big': expected one of tiny-llama, tiny-q"
    ):
        write_tiny_model(tmp_path, "big")

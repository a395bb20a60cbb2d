from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Builds a small random model: family, whether head and embedding are tied, seed."""

    def build(family: str = "qwen3", *, is_tied: bool = False, seed: int = 0) -> PreTrainedModel:
        torch.manual_seed(seed)
        if family == "qwen3":
            config = Qwen3Config(tie_word_embeddings=is_tied, **_SHAPE)
            return Qwen3ForCausalLM(config).eval()
        return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=is_tied, **_SHAPE)).eval()

    return build

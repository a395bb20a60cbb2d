"""The tiny text models of the tests: one shape, of which a test says what is different."""

import torch

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    # Logits of a size at which an error shows.
    "initializer_range": 0.1,
}
# With padding and an end as tokenizers of these tests have them.
SPECIAL = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
# What vLLM's kernels for the CPU can run.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny_config(family="qwen3", **changes):
    """A configuration: "qwen2", "qwen3", "qwen3_moe" or "llama", and what is not `SHAPE`."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**SHAPE, **changes})


def tiny_model(family="qwen3", *, seed=0, **changes):
    """A causal language model with random float32 weights of a seed."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)

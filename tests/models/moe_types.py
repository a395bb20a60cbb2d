"""Small mixtures of experts of four families."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightrft.tools.model_presets import write_tiny_model

COMMON = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TYPES = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 8},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "rope_interleave": False,
    },
}
# Layers that choose experts.
NUM_ROUTED = {"qwen3_moe": 3, "mixtral": 3, "gpt_oss": 3, "deepseek_v3": 2}


def moe_model(name, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **TYPES[name], **changes})
    # The kernel of grouped products takes no float64.
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()


def write_moe(path):
    """Write a mixture of experts with the tokenizer of the tiny models."""
    write_tiny_model(path, "tiny-qwen3", seed=1)
    config = AutoConfig.from_pretrained(path)
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": None, "bos_token_id": None}
    moe_model("qwen3_moe", vocab_size=config.vocab_size, **ends).save_pretrained(path)
    return str(path)

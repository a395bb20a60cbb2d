"""Memory of a process with a trainer of adapters and vLLM, with and without one base for both."""

import gc
from pathlib import Path

import torch
from tests.engines.vllm_adapters import plain_products
from tests.tools.plan.two_ranks import build, model_config, return_freed_memory_at_once, run_config

# Shapes of a model with 135 million weights.
SIZES = {"hidden": 576, "intermediate": 1536, "kv_heads": 3, "layers": 30, "vocab": 49152}
SIZES |= {"is_tied": True, "seq": 64, "rows": 1, "bf16": False}


def resident_bytes():
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no anonymous memory")


def measure(rank, world_size, folder, shares):
    """Return the bytes of the base, and what the process holds once the engine sleeps."""
    del rank, world_size
    from transformers import AutoModelForCausalLM

    from lightrft.engines.vllm.engine import VLLMEngine
    from lightrft.strategy import get_strategy

    return_freed_memory_at_once()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model_config(SIZES)).save_pretrained(folder)
    if not shares:
        VLLMEngine.lend_weights = lambda *_: {}
    options = {"fsdp": True, "lora_rank": 16, "lora_sync": "adapter", "pretrain": str(folder)}
    config = run_config(SIZES, options).replaced({"engine_type": "vllm", "max_len": 128})
    with get_strategy(config) as strategy:
        ready = build(SIZES, config, strategy)
        base = sum(p.numel() * 4 for p in ready.model.parameters() if not p.requires_grad)
        with plain_products():
            strategy.setup_inference_engine(None, "vllm", actor=ready)
        aliased = strategy.last_weight_sync.num_aliased_bytes
        return base, aliased, resident_bytes()

"""A pass of a vision tower on one core as models are loaded, beside transformers' own tower.

pytest benchmarks/test_bench_vision_tower.py -s
"""

from __future__ import annotations

import copy

import harness
import pytest
import torch
import transformers as hf

from lightrft.engines.hf.tower import use_fast_tower

BUDGET_SECONDS = 4.0
# Time, height and width in patches.
PICTURES = {
    "32 of 4 x 4": [[1, 4, 4]] * 32,
    "16 x 24, 10 x 12, 8 x 8": [[1, 16, 24], [1, 10, 12], [1, 8, 8]],
}
TEXT = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
}
SIZE = {"depth": 2, "num_heads": 8}
WIDE = {**SIZE, "hidden_size": 512, "intermediate_size": 1536, "out_hidden_size": 128}
CONFIGS = {
    "qwen2_vl": (hf.Qwen2VLConfig, {**SIZE, "embed_dim": 512, "hidden_size": 128}),
    "qwen2_5_vl": (hf.Qwen2_5_VLConfig, {**WIDE, "fullatt_block_indexes": [1]}),
    "qwen3_vl": (hf.Qwen3VLConfig, {**WIDE, "deepstack_visual_indexes": [0]}),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_fast_tower_is_no_slower(family, record_property):
    kind, vision = CONFIGS[family]
    config = kind(text_config=TEXT, vision_config=vision)
    plain = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    fast = copy.deepcopy(plain)
    use_fast_tower(fast)
    width = plain.model.visual.patch_embed.proj.weight[0].numel()
    for name, grids in PICTURES.items():
        grid = torch.tensor(grids)
        pixels = torch.randn(int(grid.prod(1).sum()), width)

        def passes(model, pixels=pixels, grid=grid):
            found = model.model.visual(pixels, grid_thw=grid).pooler_output
            found.square().mean().backward()

        providers = {"fast": lambda p=passes: p(fast), "plain": lambda p=passes: p(plain)}
        timings = harness.interleave(providers, torch.device("cpu"), BUDGET_SECONDS)
        ratio = timings["plain"].median / timings["fast"].median
        record_property(name, ratio)
        print(f"\n{family}, pictures {name}: {ratio:.2f} times as fast")
        assert ratio > 0.9

"""Decoding with a base of 4 bits beside the whole one, of 135 million weights with adapters.

OMP_NUM_THREADS=1 pytest benchmarks/test_bench_packed_decode.py -s
"""

from __future__ import annotations

import harness
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from lightrft.config import TrainConfig
from lightrft.engines import EngineConfig, GenerationRequest, SamplingParams
from lightrft.engines.hf.engine import HFEngine
from lightrft.models import LoraActor

pytest.importorskip("bitsandbytes", reason="package bitsandbytes is not installed")
SHAPE = Qwen2Config(
    vocab_size=49_152,
    hidden_size=576,
    num_attention_heads=9,
    num_key_value_heads=3,
    num_hidden_layers=30,
    intermediate_size=1536,
    tie_word_embeddings=True,
)
NUM_TOKENS = 16
BUDGET_SECONDS = 15.0


def engine_of(dtype: torch.dtype, quantize: str | None) -> HFEngine:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPE, dtype=dtype)
    actor = LoraActor(model, TrainConfig(lora_rank=16, quantize=quantize, fsdp=True))
    name = str(dtype).removeprefix("torch.")
    config = EngineConfig("hf", "", name, adapters=actor.adapter_shape())
    engine = HFEngine(config, module=actor.model)
    for value in engine.native.parameters():
        if value.is_floating_point():  # what is compared is time
            value.data.normal_(std=0.02)
    engine.weights.unwritten.clear()
    return engine


@pytest.mark.parametrize(
    "dtype, num_rows", [("float32", n) for n in (1, 8, 32)] + [("bfloat16", 8)]
)
def test_a_base_of_4_bits_costs_time_in_decoding(dtype, num_rows, record_property):
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [GenerationRequest((5 + i, 7, 9), request_id=i) for i in range(num_rows)]
    engines = {way: engine_of(getattr(torch, dtype), way) for way in ("nf4", None)}
    providers = {
        str(way): lambda engine=engine: engine.generate(requests, params)
        for way, engine in engines.items()
    }
    timings = harness.interleave(providers, torch.device("cpu"), BUDGET_SECONDS)
    # The fastest rounds: other programs only ever add to them.
    packed, whole = (min(timings[way].seconds) for way in providers)
    ratio = packed / whole
    record_property("ratio", ratio)
    print(f"\n{dtype}, {num_rows} rows: {ratio:.2f} times the time with the whole base")
    assert ratio < 3

"""Weights and caches of a plan are those of the model's own code, whatever its layers."""

import json

import pytest
import torch
from tests.models.all_types import types
from transformers import AutoConfig, DynamicCache

from lightrft.config import ConfigError, TrainConfig
from lightrft.tools.invariance.verdict import CompileVerdict, keep_verdict, known_verdicts
from lightrft.tools.plan.engine_room import engine_room
from lightrft.tools.plan.setup import Setup
from lightrft.tools.plan.sizes import read_model_size

NUM_TOKENS = 20


def setup_of(size, engine):
    config = TrainConfig(bf16=True, rollout_batch_size=8, n_samples_per_prompt=1)
    return Setup(config, size, 1, 1, True, 80e9, engine)


def planned(folder, config):
    config.save_pretrained(folder)
    return read_model_size(str(folder))


def bytes_of(cache):
    parts = [value for layer in cache.layers for value in vars(layer).values()]
    parts += [each for part in parts if isinstance(part, dict) for each in part.values()]
    tensors = [each for each in parts if isinstance(each, torch.Tensor) and each.ndim > 0]
    return sum(each.nbytes for each in tensors)


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "qwen3_5_text",
        "nemotron_h",
        "lfm2",
        "falcon_h1",
        "deepseek_v3",
        "llava",
    ],
)
def test_a_plan_counts_what_a_real_model_and_its_cache_hold(model_type, tmp_path):
    setup = setup_of(planned(tmp_path, types.tiny_config(model_type)), "hf")
    model = types.tiny_model(model_type).to(torch.bfloat16).eval()
    assert setup.actor_size.parameters == sum(value.numel() for value in model.parameters())
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, NUM_TOKENS, dtype=torch.long), past_key_values=cache, use_cache=True)
    assert NUM_TOKENS * setup.cache_bytes + setup.state_bytes == bytes_of(cache)


def test_the_states_of_a_large_model_are_151_megabytes_a_row(tmp_path):
    # A quarter of the layers of Qwen3.5-27B, with its heads, which decide on the states.
    config = AutoConfig.for_model(
        "qwen3_5_text",
        hidden_size=64,
        intermediate_size=64,
        vocab_size=64,
        num_hidden_layers=16,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_value_heads=48,
        linear_num_key_heads=16,
    )
    size = planned(tmp_path, config)
    assert 4 * 4 * size.measured.float_per_row == 48 * 48 * 128 * 128 * 4 == 150_994_944
    # Keys and values of a quarter of the layers.
    assert setup_of(size, "hf").cache_bytes == 2 * 4 * 2 * 4 * 256
    room = engine_room(setup_of(size, "vllm"))
    rest = (room.share_bytes - room.fixed_bytes) / room.row_bytes(room.mean_tokens)
    assert room.row_bytes(1000) - room.row_bytes(0) == 1000 * room.token_bytes
    assert room.row_bytes(0) > 150_994_944 / 4
    assert room.rows == min(8, rest)


@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_a_model_without_attention_is_refused_with_what_to_do(model_type, tmp_path):
    # Verdicts about compiling are named by sizes.
    config = types.tiny_config(model_type)
    with pytest.raises(ConfigError, match=r"num_attention_heads.*--max_steps 1 says what each"):
        planned(tmp_path, config)
    keep_verdict(str(tmp_path), "inductor", CompileVerdict(0.3, 0.2, 2048))
    assert not [*known_verdicts(str(tmp_path))]


def test_a_model_that_cannot_be_counted_is_planned_by_formulas_and_says_why(tmp_path, caplog):
    assert planned(tmp_path, types.tiny_config("openai-gpt")).measured is None
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith(f"{tmp_path}: planned by the formulas of usual decoders"), line
    assert "\n" not in line


@pytest.mark.parametrize("kind", [["llama"], None, 7])
def test_a_type_that_is_no_name_is_planned_by_formulas(kind, tmp_path):
    values = types.tiny_config("llama").to_dict() | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_model_size(str(tmp_path)).measured is None

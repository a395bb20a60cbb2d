"""At its start a run compares its needs with the machine: less for the engine, or no start."""

from __future__ import annotations

import pytest

from lightrft.config import TrainConfig
from lightrft.tools.plan.memory import plan_memory
from lightrft.tools.plan.setup import SHAPES, Setup
from lightrft.tools.plan.start_check import settle


def setup_of(name, gpus, gigabytes, *, has_gpu=True, **options):
    config = TrainConfig(engine_type="vllm", **options)
    return Setup(config, SHAPES[name], gpus, gpus, has_gpu, gigabytes * 1e9, "vllm")


def test_what_fits_is_left_alone():
    lines = []
    setup = setup_of("qwen2.5-0.5b", 1, 80)
    assert settle(setup, lines.append) is setup.config
    assert len(lines) == 1
    assert lines[0].startswith("memory: largest phase")


def test_the_engine_gets_what_the_trainer_leaves():
    lines = []
    setup = setup_of("qwen2.5-7b", 8, 80, init_kl_coef=0.01)
    assert not plan_memory(setup).fits
    config = settle(setup, lines.append)
    assert 0.3 < config.engine_mem_util < 0.5
    assert "engine_mem_util" in lines[0]
    assert plan_memory(Setup(config, SHAPES["qwen2.5-7b"], 8, 8, True, 80e9, "vllm")).fits


def test_what_cannot_fit_is_refused_with_the_sum_and_remedies():
    with pytest.raises(MemoryError, match="needs more memory than its GPUs have") as caught:
        settle(setup_of("qwen2.5-32b", 8, 80), lambda text: None)
    text = str(caught.value)
    assert "Adam's states" in text
    assert "1. --" in text
    assert "--no_check_memory" in text


def test_a_host_is_only_warned_about():
    lines = []
    setup = setup_of("qwen2.5-7b", 2, 16, has_gpu=False)
    assert settle(setup, lines.append) is setup.config
    assert any("may run out of memory" in line for line in lines)

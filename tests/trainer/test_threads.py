"""How many threads a run takes on a CPU, and who may say otherwise."""

from types import SimpleNamespace

import pytest
import torch

from lightrft.config import TrainConfig
from lightrft.run.threads import (
    FLOPS_PER_THREAD,
    choose_threads,
    decide_threads,
    max_micro_batch_tokens,
)
from lightrft.strategy.distributed.process_end import SHARED_THREADS_VARIABLE
from lightrft.tools.model_presets import write_tiny_model

SMOLLM2_135M = {"hidden_size": 576, "intermediate_size": 1536}


@pytest.fixture
def sixteen(monkeypatch):
    """A process that may use sixteen threads, and remembers how many it was told to take."""
    told = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    return told


def test_threads_follow_the_largest_product_of_a_micro_batch(sixteen):
    tiny = {"hidden_size": 96, "intermediate_size": 128}
    assert decide_threads(tiny, 128 * 80)[0] == 1
    num_threads, why = decide_threads(SMOLLM2_135M, 1024)
    assert num_threads == int(2 * 1024 * 576 * 1536 // FLOPS_PER_THREAD) == 3
    assert "1.8 GFLOP" in why
    assert decide_threads(SMOLLM2_135M, 10**6)[0] == 16
    assert decide_threads({"hidden_size": 576}, 1024)[0] == int(
        2 * 1024 * 576 * 4 * 576 // FLOPS_PER_THREAD
    )
    assert decide_threads({}, 8)[0] == 16


def test_the_environment_counts_unless_the_launcher_set_it(sixteen, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert decide_threads(SMOLLM2_135M, 8) == (16, "OMP_NUM_THREADS of the environment")
    monkeypatch.setenv(SHARED_THREADS_VARIABLE, "1")
    assert decide_threads(SMOLLM2_135M, 8)[0] == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert decide_threads(SMOLLM2_135M, 10**6)[0] == 4


@pytest.mark.parametrize(
    "device, given, chosen",
    [("cpu", None, 1), ("cpu", 5, 5), ("cuda", 5, 5), ("cuda", None, None)],
)
def test_a_choice_is_said_kept_and_set(sixteen, tmp_path, device, given, chosen):
    write_tiny_model(tmp_path, "tiny-llama")
    said = []
    context = SimpleNamespace(has_gpu=device == "cuda", print=said.append)
    config = choose_threads(TrainConfig(pretrain=str(tmp_path), num_threads=given), context)
    assert config.num_threads == chosen
    assert sixteen == ([] if chosen is None else [chosen])
    assert [line[:15] for line in said] == ["num_threads = 1"] * (chosen == 1)


def test_tokens_of_a_micro_batch():
    sizes = {"micro_train_batch_size": 4, "prompt_max_len": 32, "generate_max_len": 16}
    assert max_micro_batch_tokens(TrainConfig(**sizes)) == 192
    assert max_micro_batch_tokens(TrainConfig(**sizes, micro_batch_tokens=100)) == 100

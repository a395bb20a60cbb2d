"""Whole runs whose adapters go to the engine alone: ranks, backends, a resume, merged weights."""

from __future__ import annotations

import pytest
from tests.ranks import run_multiprocess
from tests.trainer.test_run_features import options, same, train_each, write_inputs

pytestmark = [pytest.mark.multiprocess, pytest.mark.deepspeed]
pytest.importorskip("peft", reason="package peft is not installed")


def run_of(folder, model, name, **changes):
    given = {"lora_rank": 4, "lora_alpha": 16.0, "lora_sync": "adapter", "fsdp": True, **changes}
    return options(folder, model, name, **given)


@pytest.mark.full
def test_two_ranks_agree_with_one_resume_and_sample_as_with_merged_weights(tmp_path, tiny_model):
    write_inputs(tmp_path)
    half = run_of(tmp_path, tiny_model, "half", max_steps=1)
    cells = [
        run_of(tmp_path, tiny_model, "whole"),
        half,
        {**half, "max_steps": 2, "load_checkpoint": True},
        run_of(tmp_path, tiny_model, "merged", lora_sync="merged"),
        run_of(tmp_path, tiny_model, "zero3", fsdp=False, zero_stage=3),
    ]
    alone = run_of(tmp_path, tiny_model, "alone")
    (expected,) = run_multiprocess(train_each, 1, timeout_seconds=300, args=([alone],))
    (adapters, _, resumed, merged, zero3), _ = run_multiprocess(
        train_each, 2, timeout_seconds=400, args=(cells,)
    )
    for found in (adapters, resumed, zero3):
        same(expected[0], found)
    assert adapters.pop("weight_sync_bytes") < 0.5 * merged.pop("weight_sync_bytes")
    same(adapters, merged)
    assert adapters["weights_changed"] == 1


@pytest.mark.vllm
def test_vllm_takes_the_adapters_of_two_ranks(tmp_path, tiny_model):
    write_inputs(tmp_path)
    run = run_of(tmp_path, tiny_model, "vllm", engine_type="vllm", engine_mem_util=0.1)
    (found,), _ = run_multiprocess(train_each, 2, timeout_seconds=400, args=([run],))
    assert 0 < found["weight_sync_bytes"] < 1e6
    assert found["logprob_diff_mean"] < 1e-4
    assert found["weights_changed"] == 1

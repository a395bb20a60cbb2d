"""Out of memory: recognised however it shows, told with the phase and what helps."""

import errno
import re

import pytest
import torch

from lightrft.cli.errors import is_out_of_memory, run_guarded
from lightrft.cli.options import available_options
from lightrft.cli.train import lack_of_memory_explained
from lightrft.config import TrainConfig
from lightrft.strategy.distributed.deadlines import StepTimer, phase, phase_of
from lightrft.tools.memory_advice import NUM_REMEDIES, memory_report, remedies

KINDS = ("train", "forward", "generate", "engine", "sync", "models")
PHASES = {
    "train": "--micro_train_batch_size 2 (now 4)",
    "forward": "--micro_rollout_batch_size 4 (now 8)",
    "rollout": "--engine_mem_util 0.25 (now 0.5)",
    "generate": "--engine_mem_util 0.25 (now 0.5)",
    "weight_sync": "--weight_bucket_mb 128 (now 256)",
    "load the models": "--init_kl_coef 0",
    "start the inference engine": "--engine_mem_util 0.25 (now 0.5)",
    "save a checkpoint": "--init_kl_coef 0",
    None: "--micro_train_batch_size 2 (now 4)",
}


def config(**changes):
    options = {"micro_train_batch_size": 4, "micro_rollout_batch_size": 8, "init_kl_coef": 0.01}
    return TrainConfig(**options, **changes)


def allocator_error():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46)
    return caught.value


def chained(error):
    outer = RuntimeError("rank 0 failed")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    "make",
    [
        MemoryError,
        allocator_error,
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
        lambda: RuntimeError("can't start new thread"),
        lambda: chained(MemoryError()),
    ],
)
def test_lack_of_memory_is_recognised(make):
    assert is_out_of_memory(make())


@pytest.mark.parametrize(
    "error", [ValueError("out of memory"), OSError(errno.ENOENT, "x"), RuntimeError("shape")]
)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("name", PHASES)
def test_the_report_names_the_phase_and_three_remedies(name):
    lines = memory_report(allocator_error(), name, config()).splitlines()
    assert "can't allocate memory" in lines[0]
    assert (f"in phase {name!r}" if name else "unknown phase") in lines[0]
    assert len(lines) == 2 + NUM_REMEDIES
    assert PHASES[name] in lines[2]
    assert [line.split(".")[0] for line in lines[2:]] == ["  1", "  2", "  3"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fsdp", [False, True])
def test_remedies_are_options_that_are_not_in_use_yet(kind, fsdp):
    options = available_options()
    used = {"gradient_checkpointing": True, "fused_linear_logprob": True, "adam_offload": True}
    for settings in (config(fsdp=fsdp), config(fsdp=fsdp, engine_type="hf", **used)):
        found = remedies(kind, settings)
        assert len(found) >= NUM_REMEDIES - 1
        assert len(set(found)) == len(found)
        for text in found:
            for flag, value in re.findall(r"--(\w+) ?(\d*)", text):
                assert flag in options
                wanted = int(value) if value else True
                assert settings.__dict__[flag] != wanted, text


def test_the_innermost_phase_is_remembered():
    with pytest.raises(MemoryError) as caught, StepTimer().stage("train"), phase("inner", 60):
        raise MemoryError
    assert phase_of(caught.value) == "inner"
    with pytest.raises(MemoryError) as caught, StepTimer().stage("train"):
        raise MemoryError
    assert phase_of(caught.value) == "train"
    assert phase_of(chained(caught.value)) == "train"
    assert phase_of(ValueError()) is None


def test_a_run_ends_with_code_6_and_its_own_numbers(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "LIGHTRFT_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)

    def body():
        with lack_of_memory_explained(config()), StepTimer().stage("train"):
            torch.empty(1 << 46)

    assert run_guarded("lightrft", body) == 6
    text = capsys.readouterr().err
    assert "lightrft: out of memory in phase 'train'" in text
    assert "lightrft:   1. --micro_train_batch_size 2 (now 4)" in text
    assert "Traceback" not in text

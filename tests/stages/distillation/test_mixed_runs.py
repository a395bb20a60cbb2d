"""Whole runs with teachers by row, prompts of the teacher's own, and the student's samples."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.ranks import run_multiprocess

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.supervised_rows import SupervisedRow
from lightrft.datasets.types import DataError
from lightrft.stages.distillation.own_samples import OwnSamples, with_completion
from lightrft.strategy.distributed.process_end import RunStoppedError
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer import DistillationTrainer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    for seed, name in enumerate(("student", "first", "second"), start=1):
        write_tiny_model(folder / name, "tiny-qwen3", seed=seed)
    return folder


SAMPLED = {
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 2,
    "train_batch_size": 16,
    "generate_max_len": 5,
}


def write_rows(tmp_path, **columns):
    letters = "aeiou123"
    rows = [
        {
            "input": f"say {c}",
            "prompt": f"say {c}",
            "completion": c * (1 + 9 * (i % 2)),
            **{name: values[i] for name, values in columns.items()},
        }
        for i, c in enumerate(letters)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def options(models, rows, folder, **changes):
    return {
        "pretrain": str(models / "student"),
        "prompt_data": rows,
        "output_dir": str(folder),
        "train_batch_size": 8,
        "micro_train_batch_size": 2,
        "actor_learning_rate": 2e-3,
        "lr_warmup_ratio": 0.0,
        "num_threads": 1,
        "fsdp": True,
        "max_steps": 1,
        **changes,
    }


def run(models, rows, folder, **changes):
    config = TrainConfig(**options(models, rows, folder, **changes))
    return DistillationTrainer(config).train().last_metrics


def named(models, *pairs):
    return {"teachers": tuple(f"{name}={models / place}" for name, place in pairs)}


@pytest.mark.full
@pytest.mark.parametrize("form", ["sampled", "forward"])
def test_teachers_of_one_model_are_one_teacher_and_weights_count(models, tmp_path, form):
    """The losses add up: each row has its own teacher, and one denominator."""
    given = dict(SAMPLED) if form == "sampled" else {}
    given |= {"teacher_form": form}
    rows = write_rows(tmp_path, teacher=list("xyyxxyxy"))
    alike = named(models, ("x", "first"), ("y", "first"))
    alone = run(models, rows, tmp_path / "alone", teacher=str(models / "first"), **given)
    both = run(models, rows, tmp_path / "both", **alike, **given)
    name = "advantage_abs" if form == "sampled" else "loss"
    for each in ("grad_norm", name):
        assert both[each] == pytest.approx(alone[each], rel=1e-4)
    two = named(models, ("x", "first"), ("y", "second"))
    mixed = run(models, rows, tmp_path / "mixed", **two, **given)
    weighed = {**two, "teacher_weights": (1.0, 1e-6)}
    first = run(models, rows, tmp_path / "first", **weighed, **given)
    weighed = {**two, "teacher_weights": (1e-6, 1.0)}
    second = run(models, rows, tmp_path / "second", **weighed, **given)
    assert mixed[name] == pytest.approx(first[name] + second[name], rel=1e-3)
    assert abs(mixed[name] - alone[name]) > 1e-3 * alone[name]


def test_a_row_without_a_teacher_is_named(models, tmp_path):
    rows = write_rows(tmp_path, teacher=["x"] * 7 + ["z"])
    for given in (SAMPLED, {"teacher_form": "jsd"}):
        with pytest.raises(DataError, match="holds 'z', expected the name of one of teachers: x"):
            run(models, rows, tmp_path / "run", **named(models, ("x", "first")), **given)


def test_a_privileged_prompt_teaches_and_the_first_step_proves_where(models, tmp_path):
    """The student is its own teacher: without the column it would learn nothing."""
    rows = write_rows(tmp_path, hint=[f"it is {n * n}" for n in range(8)])
    own = {"teacher": str(models / "student"), **SAMPLED}
    plain = run(models, rows, tmp_path / "plain", **own)
    shown = run(models, rows, tmp_path / "shown", teacher_prompt_column="hint", **own)
    assert plain["advantage_abs"] < 1e-5
    assert shown["advantage_abs"] > 1e-2
    log = (tmp_path / "shown" / "logs" / "rank_0.log").read_text()
    assert "teacher = student gives 0" in log


def test_a_missing_column_is_named(models, tmp_path):
    given = {"teacher": str(models / "first"), **SAMPLED, "teacher_prompt_column": "hints"}
    with pytest.raises(DataError, match="expected a text for the teacher in column 'hints'"):
        run(models, write_rows(tmp_path), tmp_path / "run", **given)


class Strategy:
    rank = 0
    world_size = 1
    context = None


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9])
def test_the_share_of_own_samples_is_that_of_the_option_in_the_mean(fraction):
    samples = OwnSamples(TrainConfig(offpolicy_fraction=fraction, teacher_form="jsd"), Strategy())
    drawn = [samples.chosen(7, number) for number in range(1, 400)]
    assert all(len(set(each.tolist())) == len(each) for each in drawn)
    assert {len(each) for each in drawn} <= {int(7 * (1 - fraction)) + i for i in (0, 1)}
    assert np.mean([len(each) for each in drawn]) == pytest.approx(7 * (1 - fraction), abs=0.1)
    assert np.array_equal(samples.chosen(7, 3), drawn[2])
    counts = np.bincount(np.concatenate(drawn), minlength=7)
    assert counts.min() > 0.7 * counts.mean()


def test_a_completion_takes_the_place_of_the_rows_own():
    row = SupervisedRow(
        np.arange(6, dtype=np.int32), np.array([0, 0, 0, 1, 0, 1], bool), teacher="x"
    )
    found = with_completion(row, (9, 8))
    assert found.token_ids.tolist() == [0, 1, 2, 9, 8]
    assert found.is_trained.tolist() == [False] * 3 + [True] * 2
    assert found.teacher == "x"


MIXED = {"generate_max_len": 4, "prompt_max_len": 32, "teacher_form": "reverse"}


@pytest.mark.full
def test_the_student_moves_to_the_teacher_on_its_own_samples(models, tmp_path):
    rows, folder = write_rows(tmp_path), tmp_path / "run"
    given = {**MIXED, "teacher": str(models / "first"), "offpolicy_fraction": 0.0}
    given |= {"max_steps": 25, "max_epochs": 25, "lr_scheduler": "constant"}
    run(models, rows, folder, **given, actor_learning_rate=5e-3)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [entry for entry in lines if entry["step"] > 0]
    losses = [entry["loss"] for entry in steps]
    assert {entry["onpolicy_share"] for entry in steps} == {1.0}
    # Tokens of rows whose completions were one or ten letters: none is longer than four.
    assert all(entry["trained_share"] * entry["num_tokens"] <= 8 * 4 for entry in steps)
    assert sum(losses[-5:]) / 5 < 0.4 * losses[0]


def test_an_interrupted_run_continues_to_the_bit(models, tmp_path):
    rows, given = write_rows(tmp_path), {**MIXED, "teacher": str(models / "first")}
    given |= {"offpolicy_fraction": 0.4, "max_steps": 3, "max_epochs": 3, "save_steps": 1}
    run(models, rows, tmp_path / "whole", **given)
    metrics = tmp_path / "parts/metrics.jsonl"
    config = TrainConfig(**options(models, rows, tmp_path / "parts", **given))
    with pytest.raises(RunStoppedError):
        DistillationTrainer(config).train(
            stop_request=lambda: metrics.is_file() and '"step": 1' in metrics.read_text()
        )
    assert DistillationTrainer(config).train().num_resumed_steps in (1, 2)
    weights = [
        (tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "parts")
    ]
    assert weights[0] == weights[1]


def in_ranks(rank, world_size, settings):
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    return DistillationTrainer(TrainConfig(**settings)).train().last_metrics


@pytest.mark.full
@pytest.mark.multiprocess
def test_a_mixed_step_of_two_teachers_is_equal_on_one_rank_and_on_two(models, tmp_path):
    rows = write_rows(tmp_path, teacher=list("xxxxxxxy"))
    given = {**MIXED, **named(models, ("x", "first"), ("y", "second")), "offpolicy_fraction": 0.5}
    given |= {"teacher_weights": (1.0, 3.0), "train_batch_size": 8}
    one = run(models, rows, tmp_path / "one", **given)
    packed = run(models, rows, tmp_path / "packed", packing_samples=True, **given)
    settings = options(models, rows, tmp_path / "two", **given)
    two = run_multiprocess(in_ranks, 2, timeout_seconds=300, args=(settings,))
    for name in ("loss", "grad_norm", "onpolicy_share"):
        for other in (packed, *two):
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
    assert one["onpolicy_share"] == 0.5


@pytest.mark.multiprocess
def test_samples_of_two_teachers_with_hints_are_equal_on_one_rank_and_on_two(models, tmp_path):
    rows = write_rows(
        tmp_path, teacher=list("xxxxxxxy"), hint=[f"is {n}" * (1 + n) for n in range(8)]
    )
    given = {**SAMPLED, **named(models, ("x", "first"), ("y", "second"))}
    given |= {"teacher_prompt_column": "hint", "teacher_weights": (1.0, 3.0)}
    one = run(models, rows, tmp_path / "one", **given)
    settings = options(models, rows, tmp_path / "two", **given)
    two = run_multiprocess(in_ranks, 2, timeout_seconds=300, args=(settings,))
    for name in ("teacher_kl", "advantage_abs", "grad_norm"):
        for other in two:
            assert other[name] == pytest.approx(one[name], rel=1e-4), name


def test_options_of_sampling_are_of_own_samples(models, tmp_path):
    given = {**MIXED, "teacher": str(models / "first")}
    with pytest.raises(ConfigError, match="generate_max_len is no option of lightrft distill"):
        run(models, write_rows(tmp_path), tmp_path / "run", **given)

"""Whole runs with teachers by row, prompts of the teacher's own, and the student's samples."""

import numpy as np
import pytest
from tests.ranks import run_multiprocess
from tests.runs import in_ranks, steps
from tests.stages.distillation.distillation_world import SAMPLED, options, run, write_rows

from lightrft.config import TrainConfig
from lightrft.datasets.row_data import SupervisedRow
from lightrft.stages.distillation.own_samples import chosen_places, with_completion

MIXED = {"generate_max_len": 4, "prompt_max_len": 32, "teacher_form": "reverse", "max_steps": 1}


def two_teachers(models, second="second"):
    return {"teachers": (f"x={models / 'teacher'}", f"y={models / second}")}


@pytest.mark.full
@pytest.mark.parametrize("form", ["sampled", "forward"])
def test_teachers_of_one_model_are_one_teacher_and_weights_count(models, tmp_path, form):
    """The losses add up: each row has its own teacher, and one denominator."""
    base = {**(SAMPLED if form == "sampled" else {"max_steps": 1}), "teacher_form": form}
    base["micro_train_batch_size"] = 2
    write_rows(tmp_path, teacher=list("xyyxxyxy"))
    two = {**base, **two_teachers(models)}
    ways = {
        "alone": base,
        "both": {**base, **two_teachers(models, "teacher")},
        "mixed": two,
        "first": {**two, "teacher_weights": (1.0, 1e-6)},
        "second": {**two, "teacher_weights": (1e-6, 1.0)},
    }
    alone, both, mixed, first, second = (
        run(models, tmp_path, name, **way).last_metrics for name, way in ways.items()
    )
    name = "advantage_abs" if form == "sampled" else "loss"
    for each in ("grad_norm", name):
        assert both[each] == pytest.approx(alone[each], rel=1e-4)
    assert mixed[name] == pytest.approx(first[name] + second[name], rel=1e-3)
    assert abs(mixed[name] - alone[name]) > 1e-3 * alone[name]


def test_a_privileged_prompt_teaches_and_the_first_step_proves_where(models, tmp_path):
    """The student is its own teacher: without the column it would learn nothing."""
    write_rows(tmp_path, hint=[f"it is {n * n}" for n in range(8)])
    same = {**SAMPLED, "teacher": str(models / "student")}
    plain = run(models, tmp_path, "plain", **same).last_metrics
    shown = run(models, tmp_path, "shown", teacher_prompt_column="hint", **same).last_metrics
    assert plain["advantage_abs"] < 1e-5
    assert shown["advantage_abs"] > 1e-2
    log = (tmp_path / "shown/logs/rank_0.log").read_text()
    assert "teacher = student gives 0" in log


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9])
def test_the_share_of_own_samples_is_that_of_the_option_in_the_mean(fraction):
    config = TrainConfig(offpolicy_fraction=fraction, teacher_form="jsd")
    drawn = [chosen_places(config, 7, number) for number in range(1, 400)]
    assert all(len(set(each.tolist())) == len(each) for each in drawn)
    assert {len(each) for each in drawn} <= {int(7 * (1 - fraction)) + i for i in (0, 1)}
    assert np.mean([len(each) for each in drawn]) == pytest.approx(7 * (1 - fraction), abs=0.1)
    assert np.array_equal(chosen_places(config, 7, 3), drawn[2])
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


@pytest.mark.full
def test_the_student_moves_to_the_teacher_on_its_own_samples(models, tmp_path):
    write_rows(tmp_path)
    changes = {**MIXED, "offpolicy_fraction": 0.0, "actor_learning_rate": 5e-3}
    changes |= {"max_steps": 25, "max_epochs": 25, "lr_scheduler": "constant"}
    run(models, tmp_path, **changes)
    entries = [entry for entry in steps(tmp_path / "run") if entry["step"] > 0]
    losses = [entry["loss"] for entry in entries]
    assert {entry["onpolicy_share"] for entry in entries} == {1.0}
    # Tokens of rows whose completions were one or ten letters: none is longer than four.
    assert all(entry["trained_share"] * entry["num_tokens"] <= 8 * 4 for entry in entries)
    assert sum(losses[-5:]) / 5 < 0.4 * losses[0]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rows", "samples"])
def test_a_step_of_two_teachers_is_equal_on_one_rank_and_on_two(models, tmp_path, kind):
    hints = [f"is {n}" * (1 + n) for n in range(8)]
    write_rows(tmp_path, teacher=list("xxxxxxxy"), hint=hints)
    base = {**two_teachers(models), "teacher_weights": (1.0, 3.0), "micro_train_batch_size": 2}
    if kind == "rows":
        base |= {**MIXED, "offpolicy_fraction": 0.5}
        names = ("loss", "grad_norm", "onpolicy_share")
        ways = {"one": {}, "packed": {"packing_samples": True}}
    else:
        base |= {**SAMPLED, "teacher_prompt_column": "hint"}
        names = ("teacher_kl", "advantage_abs", "grad_norm")
        ways = {"one": {}}
    one, *others = (run(models, tmp_path, n, **base, **w).last_metrics for n, w in ways.items())
    args = ("DistillationTrainer", [options(models, tmp_path, "two", **base)])
    ranks = run_multiprocess(in_ranks, 2, timeout_seconds=300, args=args)
    for other in (*others, *(summary["last_metrics"] for (summary,) in ranks)):
        assert {n: other[n] for n in names} == {n: pytest.approx(one[n], rel=1e-4) for n in names}
    assert one.get("onpolicy_share", 0.5) == 0.5

"""A run whose folder is moved, removed or replaced ends in one line and leaves nothing there."""

import os
import shutil
from pathlib import Path

import pytest
from tests.ranks import run_multiprocess
from tests.runs import FEW, lines, rollout_options, row_options, tiny_models, write_inputs

from lightrft.cli.errors import describe, exit_code_of
from lightrft.config import TrainConfig
from lightrft.run.assembly import run_training
from lightrft.run.callbacks import Callback

ROWS = [{"prompt": f"name {i} ", "completion": "ab"} for i in range(8)]
# What happens after the second of four steps, and options.
CASES = {
    "samples": ("policy", "moved", {}),
    "rows": ("sft", "moved", {}),
    "removed": ("sft", "removed", {}),
    "replaced": ("sft", "replaced", {}),
    "later": ("sft", "moved", {"async_save": True, "save_steps": 1}),
    "without saves": ("sft", "moved", {"save_steps": -1, "step": 3}),
    "ranks": ("sft", "moved", {"world_size": 2}),
}


def displace(folder, how):
    if how == "removed":
        shutil.rmtree(folder)
        return
    folder.rename(folder.with_name("elsewhere"))
    if how == "replaced":
        shutil.copytree(folder.with_name("elsewhere"), folder)


def run(rank, world_size, folder, stage, how, changes):
    """What is raised, the code and the line, and what lies in the folder before and after."""
    folder, changes = Path(folder), dict(changes)
    step, out = changes.pop("step", 2), folder / "run"
    shown = []

    class Displaces(Callback):
        def end_step(self, number, metrics):
            if number == step and rank == 0:
                displace(out, how)
                shown.append(listed(out))
            return {}

    common = {"train_batch_size": 2, "micro_train_batch_size": 1, "max_epochs": 1, "fsdp": True}
    options = row_options(folder / "model", folder / "train.jsonl", out, **common)
    if stage == "policy":
        options = rollout_options(folder, **FEW, max_steps=4)
    config = TrainConfig(**{**options, "save_steps": 1, **changes})
    try:
        run_training(config, stage=stage, callbacks=[Displaces()])
    except Exception as error:  # noqa: BLE001
        return exit_code_of(error), describe(error), shown, listed(out)
    return 0, "", shown, listed(out)


def listed(folder):
    return sorted(str(Path(root) / f) for root, _, files in os.walk(folder) for f in files)


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", CASES)
def test_a_folder_that_is_not_there_any_more_ends_the_run(name, tmp_path):
    stage, how, changes = CASES[name]
    world_size = changes.get("world_size", 1)
    changes = {key: value for key, value in changes.items() if key != "world_size"}
    write_inputs(tiny_models(tmp_path, "model"), ROWS)
    found = run_multiprocess(
        run, world_size, timeout_seconds=120, args=(str(tmp_path), stage, how, changes)
    )
    for code, text, shown, left in found:
        assert code == 3, text
        assert f"--output_dir: {tmp_path / 'run'} was moved or removed while the run wrote" in text
        assert "\n" not in text
        assert not shown or left == shown[0]
    assert found[0][2], "nothing was displaced"


@pytest.mark.full
def test_a_folder_that_comes_back_is_continued(tmp_path):
    write_inputs(tiny_models(tmp_path, "model"), ROWS)
    args = (str(tmp_path), "sft", "moved", {})
    ((code, *_),) = run_multiprocess(run, 1, timeout_seconds=120, args=args)
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    again = (str(tmp_path), "sft", "moved", {"step": 99})
    ((after, text, *_),) = run_multiprocess(run, 1, timeout_seconds=120, args=again)
    assert (code, after, text) == (3, 0, "")
    steps = [step["step"] for step in lines(tmp_path / "run/metrics.jsonl")]
    assert len(steps) == len(set(steps)) == 4

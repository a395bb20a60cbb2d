"""Weights that are not finite: one line that names a tensor, exit code 9, nothing published."""

import math
import shutil

import pytest
from safetensors.torch import load_file, save_file
from tests.ranks import find_free_port
from tests.runs import FEW, rollout_options, say_rows, tiny_models, words, write_inputs

from lightrft.cli.main import main

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, prompts and a reward."""
    return write_inputs(tiny_models(tmp_path_factory.mktemp("runs"), "model"), say_rows(6))


def arguments(folder, name, **changes):
    changes = {"max_steps": 1, "save_steps": 1, "eval_data": folder / "train.jsonl", **changes}
    return ["train", *words(rollout_options(folder, name, **FEW, **changes))]


def said(capsys, words, code):
    """The only line of an error."""
    capsys.readouterr()
    assert main(words) == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.fixture
def only_process(monkeypatch):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**environment, "MASTER_PORT": str(find_free_port())}.items():
        monkeypatch.setenv(name, value)


def spoil(model):
    weights = load_file(model / "model.safetensors")
    weights[NAME][3, 5] = math.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})


@pytest.mark.usefixtures("only_process")
@pytest.mark.parametrize("more", [{}, {"lora_rank": 2}, {"verify_weight_sync": False}])
def test_an_update_that_ends_all_weights_publishes_nothing(folder, capsys, more):
    name = "spoilt_" + "_".join(more)
    line = said(capsys, arguments(folder, name, l2="1e300", **more), 9)
    assert line.startswith("lightrft: after step 1 weights are not finite: model.")
    assert "--allow_changes" in line
    run = folder / name
    assert not (run / "model").exists()
    assert not list(run.glob("checkpoints/*/*/manifest.json"))
    assert (
        not (run / "metrics.jsonl").exists()
        or '"step": 1' not in (run / "metrics.jsonl").read_text()
    )


@pytest.mark.full
@pytest.mark.usefixtures("only_process")
def test_a_model_that_is_not_finite_is_not_evaluated_exported_or_trained(folder, capsys):
    assert main(arguments(folder, "run")) == 0
    spoil(folder / "run/model")
    shutil.copytree(folder / "model", folder / "spoilt_model")
    spoil(folder / "spoilt_model")
    for line in (
        ["eval", str(folder / "run")],
        ["export", str(folder / "run"), str(folder / "exported")],
        arguments(folder, "again", pretrain=folder / "spoilt_model"),
    ):
        assert f"weights are not finite: {NAME}" in said(capsys, line, 9)
    assert not (folder / "exported").exists()

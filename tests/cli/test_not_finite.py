"""Weights that are not finite: one line that names a tensor, exit code 9, nothing published."""

from __future__ import annotations

import json
import math
import shutil

import pytest
from safetensors.torch import load_file, save_file

from lightrft.cli.main import main
from lightrft.tools.model_presets import write_tiny_model

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, prompts, a reward, and a run of one step."""
    path = tmp_path_factory.mktemp("runs")
    write_tiny_model(path / "model", "tiny-qwen3", seed=1)
    rows = [json.dumps({"input": f"say {'aeiou'[i % 5] * 3}"}) for i in range(6)]
    (path / "train.jsonl").write_text("\n".join(rows))
    (path / "reward.py").write_text(
        "def score(responses):\n    return [float(sum(map(ord, r)) % 3) for r in responses]\n"
    )
    return path


def arguments(folder, name, **changes):
    options = {
        "pretrain": folder / "model",
        "prompt_data": folder / "train.jsonl",
        "eval_data": folder / "train.jsonl",
        "reward_fn": f"{folder / 'reward.py'}:score",
        "engine_type": "hf",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "train_batch_size": 4,
        "generate_max_len": 4,
        "prompt_max_len": 32,
        "init_kl_coef": 0,
        "save_steps": 1,
        "max_steps": 1,
        "output_dir": folder / name,
        **changes,
    }
    return ["train", "--fsdp", *(str(w) for k, v in options.items() for w in (f"--{k}", v))]


def said(capsys, words, code):
    """The only line of an error."""
    capsys.readouterr()
    assert main(words) == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.fixture
def only_process(monkeypatch):
    from tests.ranks import find_free_port

    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**environment, "MASTER_PORT": str(find_free_port())}.items():
        monkeypatch.setenv(name, value)


def spoil(model):
    weights = load_file(model / "model.safetensors")
    weights[NAME][3, 5] = math.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})


@pytest.mark.usefixtures("only_process")
@pytest.mark.parametrize("more", [{}, {"lora_rank": 2}, {"no_verify_weight_sync": ""}])
def test_an_update_that_ends_all_weights_publishes_nothing(folder, capsys, more):
    name = "spoilt_" + "_".join(more)
    words = [word for word in arguments(folder, name, l2="1e300", **more) if word]
    line = said(capsys, words, 9)
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
    words = arguments(folder, "run")
    assert main(words) == 0
    spoil(folder / "run" / "model")
    line = said(capsys, ["eval", str(folder / "run")], 9)
    assert f"weights are not finite: {NAME}" in line
    line = said(capsys, ["export", str(folder / "run"), str(folder / "exported")], 9)
    assert f"weights are not finite: {NAME}" in line
    assert not (folder / "exported").exists()
    shutil.copytree(folder / "model", folder / "spoilt_model")
    spoil(folder / "spoilt_model")
    line = said(capsys, arguments(folder, "again", pretrain=folder / "spoilt_model"), 9)
    assert f"weights are not finite: {NAME}" in line

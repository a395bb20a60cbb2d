"""`lightrft prefer` from the command line."""

from __future__ import annotations

import json

import pytest

from lightrft.cli.main import main
from lightrft.tools.model_presets import write_tiny_model

GOOD = '{"prompt": "a ", "chosen": "b", "rejected": "c"}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("prefer") / "model"
    write_tiny_model(path, "tiny-qwen3")
    return str(path)


def test_the_file_of_a_run_may_be_given_again(tmp_path, model, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(GOOD * 2)
    argv = ["--pretrain", model, "--prompt_data", "rows.jsonl", "--fsdp", "--train_batch_size", "2"]
    losses = ["--preference_loss", "sigmoid", "bco_pair", "sft", "--preference_weights", "0.8"]
    losses += ["0.2", "1", "--preference_args", "beta=0.2"]
    assert main(["prefer", *argv, "--output_dir", "run", *losses]) == 0
    assert "lightrft export run run_exported" in capsys.readouterr().out
    again = ["--config", "run/config.toml", "--output_dir", "again"]
    assert main(["prefer", *again]) == 0
    first, second = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
        for name in ("run", "again")
    )
    assert first == second
    assert main(["export", "run", "exported"]) == 0
    assert (tmp_path / "exported" / "model.safetensors").is_file()

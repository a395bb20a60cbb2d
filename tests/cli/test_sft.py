"""`lightrft sft` from the command line."""

from __future__ import annotations

import pytest

from lightrft.cli.main import main
from lightrft.tools.model_presets import write_tiny_model

GOOD = '{"prompt": "a ", "completion": "b"}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sft") / "model"
    write_tiny_model(path, "tiny-qwen3")
    return str(path)


def test_help_names_the_learning_rates_of_the_stages(capsys):
    assert main(["sft", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "unset means train 1e-06, sft 1e-05 (0.0001 for adapters), " in said


def test_train_names_the_command_that_takes_an_option(capsys):
    assert main(["train", "--pretrain", "m", "--train_on", "all"]) == 2
    assert "train_on is an option of lightrft sft, not of lightrft train" in capsys.readouterr().err


def test_the_file_of_a_run_may_be_given_again(tmp_path, model, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(GOOD * 2)
    argv = ["--pretrain", model, "--prompt_data", "rows.jsonl", "--fsdp", "--train_batch_size", "2"]
    assert main(["sft", *argv, "--output_dir", "run", "--train_on", "all"]) == 0
    assert "lightrft export run run_exported" in capsys.readouterr().out
    again = ["--config", "run/config.toml", "--output_dir", "again"]
    assert main(["sft", *again]) == 0
    assert main(["export", "run", "exported"]) == 0
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert main(["config", "show", "--config", "run/config.toml", "--changed"]) == 0
    assert "train_on" in capsys.readouterr().out
    scored = ["--eval_data", "asked.jsonl", "--reward_fn", "gsm8k", "--generate_max_len", "4"]
    (tmp_path / "asked.jsonl").write_text('{"input": "1+1", "label": "#### 2"}\n')
    assert main(["eval", "run", *scored, "--output_dir", "scored"]) == 0

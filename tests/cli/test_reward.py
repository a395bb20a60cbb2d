"""`lightrft reward` from the command line."""

from __future__ import annotations

import pytest

from lightrft.cli.main import main
from lightrft.tools.model_presets import write_tiny_model

GOOD = '{"prompt": "a ", "chosen": "b", "rejected": "c"}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "model"
    write_tiny_model(path, "tiny-qwen3")
    return str(path)


def test_other_commands_name_the_command_that_takes_an_option(capsys):
    for command in ("train", "sft"):
        assert main([command, "--pretrain", "m", "--reward_loss", "hps"]) == 2
        said = capsys.readouterr().err
        assert f"reward_loss is an option of lightrft reward, not of lightrft {command}" in said


def test_the_file_of_a_run_may_be_given_again(tmp_path, model, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(GOOD * 2)
    (tmp_path / "own.py").write_text(
        "def squared(differences, is_tie, *, target=1.0):\n    return (differences - target) ** 2\n"
    )
    argv = ["--pretrain", model, "--prompt_data", "rows.jsonl", "--fsdp", "--train_batch_size", "2"]
    own = ["--reward_loss", "own.py:squared", "--reward_loss_args", "target=2"]
    assert main(["reward", *argv, *own, "--output_dir", "run"]) == 0
    assert "lightrft train --reward_pretrain run/model" in capsys.readouterr().out
    again = ["--config", "run/config.toml", "--output_dir", "again"]
    assert main(["reward", *again]) == 0
    assert main(["export", "run", "exported"]) == 0
    card = (tmp_path / "exported/README.md").read_text()
    assert "# Reward model" in card
    assert "model = AutoModelForSequenceClassification" in card
    assert main(["config", "show", "--config", "run/config.toml", "--changed"]) == 0
    assert "reward_loss_args" in capsys.readouterr().out

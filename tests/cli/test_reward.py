"""`lightrft reward` from the command line: each wrong input is one line with its exit code."""

from __future__ import annotations

import pytest

from lightrft.cli.main import main
from lightrft.tools.model_presets import write_tiny_model

GOOD = '{"prompt": "a ", "chosen": "b", "rejected": "c"}\n'
LABELLED = '{"prompt": "a ", "completion": "b", "label": true}\n'
# Name -> rows, further arguments, exit code, and what the line says.
WRONG = {
    "no column": ('{"text": "a"}', [], 4, "rows.jsonl:1: expected columns chosen and rejected"),
    "no rows": ("", [], 4, "rows.jsonl holds no rows"),
    "two kinds": (GOOD + LABELLED, [], 4, "rows.jsonl:2: expected rows like the first"),
    "alike": (GOOD.replace('"c"', '"b"'), [], 4, "rows.jsonl:1: chosen and rejected are the same"),
    "worse": (
        GOOD.replace("}", ', "margin": -1}'),
        [],
        4,
        "rows.jsonl:1: the chosen answer is worse than the rejected one, by 1",
    ),
    "no label": (LABELLED.replace("true", '"yes"'), [], 4, "column 'label' must be true or false"),
    "no ranks": (
        '{"prompt": "a ", "answers": ["b", "c"]}',
        [],
        4,
        "rows.jsonl:1: column 'ranks' must hold a list",
    ),
    "too long": (GOOD, ["--max_row_tokens", "2"], 4, "all 1 pairs exceed max_row_tokens = 2"),
    "no such loss": (GOOD, ["--reward_loss", "dpo"], 2, "reward_loss: got 'dpo', expected one of"),
    "of labels": (GOOD, ["--reward_loss", "mse"], 2, "reward_loss mse is of labelled answers"),
    "of pairs": (LABELLED, ["--reward_loss", "hps"], 2, "reward_loss hps is of pairs or rankings"),
    "no pairs": (LABELLED, ["--centering_coef", "0.1"], 2, "centering_coef is of pairs"),
    "other kind": (
        GOOD,
        ["--eval_data", "other.jsonl"],
        2,
        "must be of one kind: got labelled",
    ),
    "of sft": (GOOD, ["--train_on", "all"], 2, "train_on is an option of lightrft sft"),
    "few rows": (GOOD, ["--train_batch_size", "2"], 2, "has 1 usable rows, less than one step"),
    "no model": (GOOD, ["--pretrain", "nothing"], 2, "--pretrain: no model directory at nothing"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "model"
    write_tiny_model(path, "tiny-qwen3")
    return str(path)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_one_line_before_a_model_is_built(
    tmp_path, model, capsys, monkeypatch, name
):
    rows, arguments, code, said = WRONG[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "other.jsonl").write_text(LABELLED)
    argv = ["--pretrain", model, "--prompt_data", "rows.jsonl", "--fsdp", "--output_dir", "run"]
    assert main(["reward", *argv, "--train_batch_size", "1", *arguments]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert said in lines[0]
    assert not (tmp_path / "run").exists()


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

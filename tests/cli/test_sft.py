"""`lightrft sft` from the command line: each wrong input is one line with its exit code."""

from __future__ import annotations

import json

import pytest

from lightrft.cli.main import main
from lightrft.tools.model_presets import write_tiny_model

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
GOOD = '{"prompt": "a ", "completion": "b"}\n'
# Name -> rows, further arguments, exit code, and what the line says.
WRONG = {
    "no column": ('{"question": "a"}', [], 4, "rows.jsonl:1: expected a column messages"),
    "no JSON": (GOOD + "{", [], 4, "rows.jsonl:2: not valid JSON"),
    "no rows": ("", [], 4, "rows.jsonl holds no rows"),
    "another kind": (GOOD + '{"text": "a"}', [], 4, "rows.jsonl:2: expected prompt and completion"),
    "no answer": (json.dumps({"messages": CHAT[:1]}), [], 4, "rows.jsonl:1: no message of role"),
    "empty completion": ('{"prompt": "a", "completion": ""}', [], 4, "column 'completion' must"),
    "too long": (GOOD, ["--max_row_tokens", "2"], 4, "all 1 rows exceed max_row_tokens = 2"),
    "wrong mask": (GOOD, ["--train_on", "assistant"], 4, "train_on assistant: rows with prompt"),
    "no such mask": (GOOD, ["--train_on", "all_of_it"], 2, "train_on: got 'all_of_it', expected"),
    "no such loss": (
        GOOD,
        ["--sft_loss", "nll"],
        2,
        "sft_loss: got 'nll', expected one of ['token",
    ),
    "no pattern": (GOOD, ["--train_on_regex", "("], 2, "train_on_regex: got '(', expected a regul"),
    "no match": (
        GOOD,
        ["--train_on_regex", "x"],
        4,
        "train_on_regex 'x' matches no token",
    ),
    "frozen": (GOOD, ["--audit_every", "1", "--freeze_prefix", "a"], 2, "an audit follows all wei"),
    "of train": (GOOD, ["--policy_loss", "gspo"], 2, "policy_loss is an option of lightrft train"),
    "misspelled": (GOOD, ["--max_epoch", "2"], 2, "unknown option 'max_epoch'; did you mean"),
    "no file": (None, [], 4, "rows.jsonl does not exist"),
    "few rows": (GOOD, ["--train_batch_size", "2"], 2, "has 1 usable rows, less than one step"),
    "no model": (GOOD, ["--pretrain", "nothing"], 2, "--pretrain: no model directory at nothing"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sft") / "model"
    write_tiny_model(path, "tiny-qwen3")
    return str(path)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_one_line_before_a_model_is_built(
    tmp_path, model, capsys, monkeypatch, name
):
    rows, arguments, code, said = WRONG[name]
    monkeypatch.chdir(tmp_path)
    if rows is not None:
        (tmp_path / "rows.jsonl").write_text(rows)
    argv = ["--pretrain", model, "--prompt_data", "rows.jsonl", "--fsdp", "--output_dir", "run"]
    assert main(["sft", *argv, "--train_batch_size", "1", *arguments]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert said in lines[0]
    assert not (tmp_path / "run").exists()


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

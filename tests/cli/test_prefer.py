"""`lightrft prefer` from the command line: each wrong input is one line with its exit code."""

from __future__ import annotations

import json

import pytest

from lightrft.cli.main import main
from lightrft.tools.model_presets import write_tiny_model

ROW = {"prompt": "a ", "chosen": "b", "rejected": "c"}
GOOD = json.dumps(ROW) + "\n"
LABELLED = json.dumps({"prompt": "a ", "completion": "b", "label": True}) + "\n"
# Name -> rows, further arguments, exit code, and what the line says.
WRONG = {
    "no column": ('{"prompt": "a"}', [], 4, "rows.jsonl:1: expected columns chosen and rejected"),
    "no JSON": (GOOD + "{", [], 4, "rows.jsonl:2: not valid JSON"),
    "another kind": (GOOD + LABELLED, [], 4, "rows.jsonl:2: expected rows like the first"),
    "no preference": (
        json.dumps(ROW | {"chosen": "c"}),
        [],
        4,
        "rows.jsonl:1: chosen and rejected",
    ),
    "empty answer": (json.dumps(ROW | {"rejected": ""}), [], 4, "column 'rejected' must hold a te"),
    "swapped scores": (json.dumps(ROW | {"margin": -2}), [], 4, "the chosen answer is worse than"),
    "too long": (GOOD, ["--max_row_tokens", "2"], 4, "all 1 pairs exceed max_row_tokens = 2"),
    "no such loss": (GOOD, ["--preference_loss", "dop"], 2, "(did you mean 'dpo'?)"),
    "idle value": (
        GOOD,
        ["--preference_args", "gamma=1"],
        2,
        "preference_args: gamma does nothing",
    ),
    "idle weight": (GOOD, ["--preference_weights", "1", "2"], 2, "got 2 for 1 losses"),
    "no value": (GOOD, ["--preference_args", "beta=x"], 2, "preference_loss dpo: beta: got 'x'"),
    "labels alone": (LABELLED, [], 2, "preference_loss dpo compares two answers to a prompt"),
    "of sft": (GOOD, ["--train_on", "all"], 2, "train_on is an option of lightrft sft, not of"),
    "regex of sft": (GOOD, ["--train_on_regex", "x"], 2, "train_on_regex is an option of lightrft"),
    "loss of sft": (GOOD, ["--sft_loss", "dft"], 2, "sft_loss is an option of lightrft sft, not"),
    "of train": (GOOD, ["--policy_loss", "gspo"], 2, "policy_loss is an option of lightrft train"),
    "few rows": (GOOD, ["--train_batch_size", "2"], 2, "has 1 usable rows, less than one step"),
    "no model": (GOOD, ["--pretrain", "nothing"], 2, "--pretrain: no model directory at nothing"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("prefer") / "model"
    write_tiny_model(path, "tiny-qwen3")
    return str(path)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_one_line_before_a_model_is_built(
    tmp_path, model, capsys, monkeypatch, name
):
    rows, arguments, code, said = WRONG[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(rows)
    argv = ["--pretrain", model, "--prompt_data", "rows.jsonl", "--fsdp", "--output_dir", "run"]
    assert main(["prefer", *argv, "--train_batch_size", "1", *arguments]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert said in lines[0]
    assert not (tmp_path / "run").exists()


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

"""`lightrft distill` from the command line: wrong inputs are one line, its files serve again."""

from __future__ import annotations

import json

import pytest

from lightrft.cli.main import main
from lightrft.tools.model_presets import write_tiny_model

ROWS = "".join(json.dumps({"input": f"say {c}", "label": "#### 2"}) + "\n" for c in "abcd")
# Name -> further arguments, and what the line says.
WRONG = {
    "no teacher": ([], "--teacher is missing"),
    "no such teacher": (["--teacher", "nothing"], "--teacher: no model directory at nothing"),
    "an estimator": (
        ["--teacher", "model", "--advantage_estimator", "rloo"],
        "advantage_estimator: got 'rloo', and distillation has no advantage but the teacher's",
    ),
    "a wrong gradient": (["--teacher", "model", "--teacher_form", "k3"], "k3 as a reward has the"),
    "truncated": (
        ["--teacher", "model", "--top_k", "3"],
        "leave out top_p, top_k, min_p and use_fire",
    ),
    "of sft": (
        ["--teacher", "model", "--train_on", "all"],
        "train_on is an option of lightrft sft",
    ),
    "misspelled": (["--teacher_coeff", "2"], "unknown option 'teacher_coeff'; did you mean"),
}
SIZES = [
    *("--rollout_batch_size", "4", "--n_samples_per_prompt", "2", "--train_batch_size", "8"),
    *("--generate_max_len", "4", "--max_steps", "1", "--fsdp"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "model", "tiny-qwen3")
    (tmp_path / "rows.jsonl").write_text(ROWS)
    return tmp_path


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_one_line(folder, capsys, name):
    arguments, said = WRONG[name]
    argv = ["--pretrain", "model", "--prompt_data", "rows.jsonl", "--output_dir", "run"]
    assert main(["distill", *argv, *SIZES, *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert not (folder / "run").exists()


@pytest.mark.full
def test_rewards_are_reported_and_the_file_of_a_run_may_be_given_again(folder, capsys):
    argv = ["--pretrain", "model", "--prompt_data", "rows.jsonl", "--teacher", "model"]
    measured = ["--reward_fn", "gsm8k", "--eval_data", "rows.jsonl"]
    assert main(["distill", *argv, *SIZES, *measured, "--output_dir", "run"]) == 0
    assert "lightrft export run" in capsys.readouterr().out
    steps = list(map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines()))
    assert "eval/reward" in steps[0]
    assert steps[-1]["advantage_abs"] < 1e-5
    again = ["--config", "run/config.toml", "--output_dir", "again"]
    assert main(["distill", *again]) == 0
    # The options say all: `train` with them is the same run.
    assert main(["train", *again[:2], "--output_dir", "third"]) == 0


def test_rows_with_completions_are_distilled_and_their_file_may_be_given_again(folder, capsys):
    (folder / "given.jsonl").write_text('{"prompt": "a ", "completion": "b"}\n' * 2)
    argv = ["--pretrain", "model", "--prompt_data", "given.jsonl", "--teacher", "model"]
    sizes = ["--train_batch_size", "2", "--fsdp", "--max_row_tokens", "64"]
    assert main(["distill", *argv, *sizes, "--teacher_form", "jsd", "--output_dir", "run"]) == 0
    assert "lightrft export run" in capsys.readouterr().out
    again = ["--config", "run/config.toml", "--output_dir", "again"]
    assert main(["distill", *again, "--teacher_beta", "0.2"]) == 0

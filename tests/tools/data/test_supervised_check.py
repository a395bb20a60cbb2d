"""`lightrft data check --stage sft`: what it says is what the stage does, row by row."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.datasets.files import scan_rows
from lightrft.datasets.supervised_rows import RowEncoder, load_supervised
from lightrft.models.loading import load_tokenizer
from lightrft.stages.rows.row_stage import num_updates
from lightrft.tools.data.stored_check import check_rows
from lightrft.tools.model_presets import write_tiny_model

GOOD = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "model"
    write_tiny_model(path, "tiny-qwen3", seed=0)
    return str(path)


@pytest.fixture
def check(tmp_path, capsys, monkeypatch, model):
    """`check(rows, *flags)`: the exit code, what was printed and what was complained about."""
    monkeypatch.chdir(tmp_path)

    def run(rows, *flags):
        text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
        (tmp_path / "p.jsonl").write_text(text)
        code = main(["data", "check", "p.jsonl", "--stage", "sft", "--pretrain", model, *flags])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_good_rows_are_shown_with_their_mask_and_counted(check):
    rows = [*GOOD, GOOD[1], {"prompt": "say a line\n" * 9, "completion": "a"}]
    flags = ("--max_row_tokens", "20", "--train_batch_size", "2", "--max_epochs", "3")
    code, out, err = check(rows, *flags)
    assert (code, err) == (0, "")
    for line in (
        "p.jsonl: 8 rows, 8 of them readable",
        "rows with prompt and completion, trained: completion",
        "p.jsonl:1: 6 tokens, 2 trained (>>...<<)",
        "    0+1=>>1<|end|><<",
        "tokens of a row: shortest 6, median 6, 90 % 6, 99 % 6, longest 6",
        "over 20 tokens (a run leaves them out; --max_row_tokens): 1, first: p.jsonl:8",
        "duplicate rows (a run uses them all): 1, first: p.jsonl:7 = p.jsonl:2",
        "a run on 1 process: 9 steps of 2 rows; on average 12 tokens a step, 4 of them trained; "
        "108 and 36 in all",
        "rows that cannot be used: 0",
        "7 rows can be trained on",
    ):
        assert f"{line}\n" in out, out


def test_every_bad_row_has_its_line(check):
    empty = {"token_ids": [1, 2], "is_trained": [1, 0]}
    rows = [{"token_ids": [1, 2], "is_trained": [0, 1]}, empty, "{", *[{"text": "a"}] * 30]
    code, out, _ = check(rows)
    assert code == 4
    assert "rows without a trained token: 1\n" in out
    assert "rows that cannot be used: 32\n" in out
    for place in range(2, 34):
        assert f"\n  p.jsonl:{place}: " in out
    assert out.endswith("\n32 bad rows\n")


def test_a_damaged_generation_config_is_refused_as_by_a_run(check, model, tmp_path):
    damaged = shutil.copytree(model, tmp_path / "damaged")
    (damaged / "generation_config.json").write_text("{")
    assert check(GOOD, "--pretrain", str(damaged))[0] == 2


def test_a_run_that_has_no_step_is_said(check):
    assert "a run takes 128 rows a step, and has 6: set --train_batch_size" in check(GOOD)[1]


@pytest.mark.parametrize("kind", ["text", "chat", "token ids"])
def test_rows_and_counts_are_those_of_the_stage(tmp_path, model, kind):
    rng = np.random.default_rng(len(kind))
    lengths = rng.integers(2, 40, 30).tolist()
    made = {
        "text": lambda n: {"text": "a" * n},
        "chat": lambda n: {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b" * n},
            ]
        },
        "token ids": lambda n: {"token_ids": [5] * n, "is_trained": [0] * (n - 1) + [1]},
    }[kind]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(made(n)) + "\n" for n in lengths))
    tokenizer, config = load_tokenizer(model), TrainConfig(max_row_tokens=30, train_batch_size=4)
    data = load_supervised(str(path), tokenizer, config, max_samples=100, split="train")
    name = {"chat": "messages"}.get(kind, kind)
    found = check_rows(list(scan_rows(path)), RowEncoder(tokenizer, config, name).rows, 30)
    assert 0 < len(found.too_long) == len(lengths) - len(data)
    assert f"dropped {len(found.too_long)} over-long (first: {found.too_long[0]}" in data.summary
    for (_, mine), row in zip(found.rows, data.rows, strict=True):
        assert mine.token_ids.tobytes() == row.token_ids.tobytes()
        assert mine.is_trained.tobytes() == row.is_trained.tobytes()
    assert num_updates(len(data), config, 1) == len(data) // 4


# Name -> rows, further arguments, exit code, and what the line says.
WRONG = {
    "no such stage": (GOOD, ["--stage", "dpo"], 2, "argument --stage: invalid choice: 'dpo'"),
    "of train": (GOOD, ["--reward_fn", "gsm8k"], 2, "not of lightrft data check"),
    "no model": (GOOD, ["--pretrain", "nothing"], 2, "--pretrain: no model directory at nothing"),
    "no number": (GOOD, ["--max_row_tokens", "1"], 2, "max_row_tokens: got 1, expected"),
    "wrong mask": (GOOD, ["--train_on", "assistant"], 4, "train_on assistant: rows with prompt"),
    "no template": (GOOD, ["--chat_template", "a.jinja"], 2, "a.jinja"),
    "no kind": ([{"question": "a"}], [], 4, "p.jsonl:1: expected a column messages"),
    "no rows": ([], [], 4, "p.jsonl holds no rows"),
    "nothing readable": (["{"], [], 4, "no row of 1 can be read: p.jsonl:1: not valid JSON"),
    "endless": (
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
        ["--chat_template", "loop.jinja"],
        4,
        "p.jsonl:1: the chat template takes more than 20 seconds or 1024 MiB for one row",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_one_line(check, tmp_path, name):
    rows, flags, code, said = WRONG[name]
    (tmp_path / "loop.jinja").write_text("{{ 'x' * 10**10 }}")
    found, _, err = check(rows, *flags)
    assert found == code
    (line,) = err.strip().splitlines()
    assert said in line

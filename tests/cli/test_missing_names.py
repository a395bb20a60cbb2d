"""A library that lacks a name which every run needs."""

import importlib.metadata

import torch
from tests.runs import row_options, tiny_models, words, write

from lightrft.cli.main import main


def test_a_run_ends_at_its_start_with_the_missing_name(monkeypatch, tmp_path, capsys):
    monkeypatch.delattr(torch, "_assert_async")
    rows = write(tmp_path / "rows.jsonl", [{"text": "say a"}])
    options = row_options(tiny_models(tmp_path, "model") / "model", rows, tmp_path / "run")
    assert main(["sft", *words(options)]) == 3
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("lightrft")]
    assert "Traceback" not in said
    assert f"torch {importlib.metadata.version('torch')} lacks torch._assert_async" in line
    assert "install torch>=" in line

"""`lightrft data check` on rows that a test has."""

import json

import pytest

from lightrft.cli.main import main


@pytest.fixture
def checked(tmp_path, capsys, monkeypatch):
    """`checked(rows, *flags)`: the exit code, what was printed and what was complained about."""
    monkeypatch.chdir(tmp_path)

    def run(rows, *flags):
        text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
        (tmp_path / "p.jsonl").write_text(text)
        code = main(["data", "check", "p.jsonl", *flags])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run

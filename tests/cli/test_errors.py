"""Exceptions become lines and exit codes."""

from __future__ import annotations

import importlib
import json

import pytest

from lightrft.cli.errors import ExitCode, UsageError, run_guarded


def raise_(error, cause=None):
    def body():
        raise error from cause

    return body


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "LIGHTRFT_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


KNOWN_ERRORS = (
    ("lightrft.cli.errors", "UsageError", ("text",), 2),
    ("lightrft.strategy.config", "ConfigError", ("text",), 2),
    ("lightrft.models.loading", "ModelLoadError", ("text",), 2),
    ("lightrft.datasets.types", "DataError", ("text",), 4),
    ("lightrft.rewards.types", "RewardError", ("text",), 5),
    ("lightrft.strategy.weight_sync.accounting", "WeightSyncError", ("hash", "text"), 8),
    ("lightrft.cli.errors", "WorkerError", ("text", 77), 77),
)


@pytest.mark.parametrize(("module", "name", "arguments", "code"), KNOWN_ERRORS)
def test_errors_for_the_user_are_one_line(capsys, module, name, arguments, code):
    error = getattr(importlib.import_module(module), name)(*arguments)
    assert run_guarded("lightrft", raise_(error)) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lightrft: ")
    assert line.endswith("text")


def test_other_errors_show_where_they_come_from(capsys):
    assert run_guarded("lightrft", raise_(ZeroDivisionError("odd"))) == ExitCode.UNEXPECTED
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "ZeroDivisionError: odd" in text


def test_the_code_of_a_cause_counts(capsys):
    error = RuntimeError("while loading")
    assert run_guarded("lightrft", raise_(error, UsageError("x"))) == ExitCode.USAGE


def test_an_interrupt_has_the_shells_code(capsys):
    assert run_guarded("lightrft", raise_(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "lightrft: interrupted\n"


def test_a_worker_of_our_own_launcher_leaves_a_report_and_prints_nothing(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("LIGHTRFT_LAUNCHED", "1")
    assert run_guarded("lightrft", raise_(UsageError("text"))) == 2
    assert capsys.readouterr().err == ""
    report = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (report["message"], report["errorCode"]) == ("text", 2)


def test_success_passes_its_code_on():
    assert run_guarded("lightrft", lambda: 0) == 0

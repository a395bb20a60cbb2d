"""Exceptions become lines and exit codes."""

import errno
import importlib
import json
import os

import pytest
from tests.programs import run_python

from lightrft.cli import errors
from lightrft.cli.errors import (
    ExitCode,
    UsageError,
    describe,
    exit_code_of,
    is_out_of_memory,
    run_guarded,
)
from lightrft.config.files import FileError
from lightrft.datasets.types import DataError
from lightrft.models.loading import ModelLoadError
from lightrft.reporting.loggers import JsonLinesFile
from lightrft.rewards.types import RewardError
from lightrft.strategy.checkpoints.checkpoints import CheckpointSaver
from lightrft.strategy.checkpoints.folders import SaveRequest
from lightrft.strategy.distributed.collectives import ALONE
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.distributed.process_end import CheckpointError, PeerFailedError
from lightrft.strategy.weight_sync.verification import WeightSyncError


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
    ("lightrft.cli.errors", "PreflightError", ("text",), 3),
    ("lightrft.strategy.config", "ConfigError", ("text",), 2),
    ("lightrft.models.loading", "ModelLoadError", ("text",), 2),
    ("lightrft.models.ulysses", "LayoutRefusedError", ("text",), 2),
    ("lightrft.datasets.types", "DataError", ("text",), 4),
    ("lightrft.rewards.types", "RewardError", ("text",), 5),
    ("lightrft.strategy.weight_sync.verification", "WeightSyncError", ("hash", "text"), 8),
    ("lightrft.strategy.distributed.process_end", "NonFiniteError", ("text",), 9),
    ("builtins", "FloatingPointError", ("text",), 9),
    ("lightrft.strategy.distributed.process_end", "RunStoppedError", (3, "text"), 75),
    ("lightrft.cli.errors", "WorkerError", ("text", 77), 77),
)


@pytest.mark.parametrize("module, name, arguments, code", KNOWN_ERRORS)
def test_errors_for_the_user_are_one_line(capsys, module, name, arguments, code):
    error = getattr(importlib.import_module(module), name)(*arguments)
    assert run_guarded("lightrft", raise_(error)) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lightrft: ")
    assert "text" in line


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


@pytest.mark.parametrize(
    "text",
    [
        "rank 1: OSError: [Errno 28] No space left on device: '/x'",
        "rank 0: SafetensorError: Error while serializing: I/O error: No space left on device "
        "(os error 28)",
        "saving into ckpt failed: rank 1: OSError: [Errno 122] Disk quota exceeded",
        "rank 0: SafetensorError: I/O error: File too large (os error 27)",
        "rank 0: OSError: [Errno 5] Input/output error: '/x'",
        "rank 0: OSError: [Errno 116] Stale file handle: '/x'",
        "rank 0: SafetensorError: I/O error: No such device (os error 19)",
        "rank 0: OSError: [Errno 107] Transport endpoint is not connected: '/x'",
    ],
)
def test_a_disk_is_no_mistake_of_usage_whoever_says_so(capsys, text):
    from safetensors import SafetensorError

    from lightrft.strategy.distributed.process_end import CheckpointError

    for error in (CheckpointError(text), SafetensorError(text)):
        assert run_guarded("lightrft", raise_(error)) == ExitCode.PREFLIGHT
        assert capsys.readouterr().err == f"lightrft: {text}\n"
    assert run_guarded("lightrft", raise_(CheckpointError("rank 280 failed"))) == ExitCode.USAGE


def test_a_disk_that_fails_while_it_is_read_is_none_either(capsys):
    def read(kind):
        try:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        except OSError as error:
            raise kind("x cannot be read: Input/output error") from error

    for kind in (FileError, DataError):
        assert run_guarded("lightrft", lambda kind=kind: read(kind)) == ExitCode.PREFLIGHT
    # That of another machine is no matter of this one.
    assert run_guarded("lightrft", lambda: read(RewardError)) == ExitCode.REWARD


def test_a_missing_extra_is_no_mistake_of_usage_wherever_it_is_missed():
    """What looks for a package may find it, and the import fails all the same."""

    def load(kind):
        try:
            raise ImportError("X requires the PIL library")
        except ImportError as error:
            raise kind("needs more packages: pip install 'lightrft[vision]'") from error

    for kind in (ModelLoadError, DataError, ImportError):
        with pytest.raises(kind) as caught:
            load(kind)
        assert exit_code_of(caught.value) == ExitCode.PREFLIGHT
    assert exit_code_of(DataError("write lightrft[vision]")) == ExitCode.DATA
    assert exit_code_of(ImportError("cannot import name x")) == ExitCode.UNEXPECTED


@pytest.mark.parametrize("number", ["EIO", "ESTALE", "ENODEV", "ENOTCONN", "EDQUOT", "ENOSPC"])
@pytest.mark.parametrize("in_background", [False, True])
def test_what_a_flush_cannot_do_names_the_folder(tmp_path, monkeypatch, number, in_background):
    """Every flush of a checkpoint in its turn, and that of a file that appears whole."""
    code = getattr(errno, number)
    saver = CheckpointSaver(ALONE, (lambda: ALONE) if in_background else None)
    fsync, calls = os.fsync, []

    def save(fails_at):
        def fails(descriptor):
            calls.append(descriptor)
            if len(calls) == fails_at:
                raise OSError(code, os.strerror(code))
            fsync(descriptor)

        def write(folder, files):
            files.text(folder / "x", "text")

        calls.clear()
        monkeypatch.setattr(os, "fsync", fails)
        saver.save(SaveRequest(save_dir=tmp_path / "ckpt", strategy="s"), write)
        saver.finish()

    save(None)
    for place in range(1, len(calls) + 1):
        with pytest.raises(CheckpointError) as error:
            save(place)
        assert exit_code_of(error.value) == ExitCode.PREFLIGHT
        text = describe(error.value)
        assert f"saving into {tmp_path / 'ckpt'} failed: " in text
        assert f"[Errno {code}] {os.strerror(code)}: '{tmp_path / 'ckpt'}" in text
    saver.close()


def test_a_line_that_cannot_be_written_names_its_file(tmp_path):
    log = JsonLinesFile(tmp_path / "full")
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"\[Errno 28\] .*/full'") as error:
        log.append({"step": 1})
    assert exit_code_of(error.value) == ExitCode.PREFLIGHT


@pytest.mark.full
def test_a_file_that_cannot_be_written_says_why(tmp_path):
    """The system's own limit stands for a full disk."""
    program = """if True:
        import resource, signal, sys
        from pathlib import Path
        import torch
        from lightrft.cli.errors import run_guarded
        from lightrft.strategy.checkpoints.folders import SaveRequest, write_checkpoint
        from lightrft.strategy.checkpoints.files import FileWriter

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        state = {"a": torch.ones(10_000)}
        writers = {
            "tensors": lambda path: FileWriter().tensors(path, state),
            "zip": lambda path: FileWriter().pickled(path, state),
            "pickle": lambda path: FileWriter().pickled(path, state, is_zip=False),
        }

        def body(kind):
            def write(path, _):
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
                writers[kind](path / "x")

            write_checkpoint(SaveRequest(save_dir=Path(sys.argv[1]), strategy="s"), write)
            return 0

        print(*(run_guarded("lightrft", lambda kind=kind: body(kind)) for kind in writers))
    """
    done = run_python("-c", program, str(tmp_path), timeout_seconds=100)
    assert done.stdout.split() == ["3", "3", "3"], done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_words_of_a_reward_are_not_memory_of_ours(capsys):
    from lightrft.rewards.types import RewardError

    error = RewardError("the worker process was ended by SIGSEGV (out of memory, or a crash)")
    assert run_guarded("lightrft", raise_(error)) == ExitCode.REWARD
    assert not is_out_of_memory(error)
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))


@pytest.mark.parametrize(
    "error, words",
    [
        (RuntimeError("[/x/pair.cc:5] Connection closed by peer [::1]:1. GLHF!"), "closed by peer"),
        (RuntimeError("Read error: Connection reset by peer"), "reset by peer"),
        (CheckpointError("saving into x failed: rank 0: RuntimeError: Broken pipe"), "broken pipe"),
        (WeightSyncError("transfer", "Connection reset by peer"), "reset by peer"),
        (PeerFailedError("sampling failed on rank 1: OSError: x"), "on rank 1: OSError: x"),
    ],
)
def test_who_loses_another_rank_says_so_in_a_line(capsys, error, words):
    assert run_guarded("lightrft", raise_(error)) == ExitCode.UNEXPECTED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lightrft: ended because another rank failed: ")
    assert line.endswith(words)


def test_an_error_that_is_its_own_cause_ends_with_a_line(capsys):
    error = RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError), phase("exchange", 60):
        raise error from error
    assert run_guarded("lightrft", raise_(error, error)) == ExitCode.UNEXPECTED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("rank 0 lost it in phase 'exchange': connection closed by peer")


def test_a_service_that_refuses_a_connection_is_no_rank(capsys):
    from lightrft.rewards.types import RewardError

    assert run_guarded("lightrft", raise_(RewardError("Connection refused"))) == ExitCode.REWARD
    assert "another rank" not in capsys.readouterr().err


@pytest.mark.parametrize("module, name", [row[:2] for row in errors.ERROR_CODES])
def test_every_error_with_a_code_is_where_the_table_says(module, name):
    assert issubclass(getattr(importlib.import_module(module), name), Exception)

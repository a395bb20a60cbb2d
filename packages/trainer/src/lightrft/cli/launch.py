"""Processes of a run: this one alone, or several under torch's elastic agent."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lightrft.cli.errors import LAUNCHED_BY_LIGHTRFT, ExitCode, WorkerError, words_of_lost_peer
from lightrft.strategy.distributed.process_end import (
    PHASE_FOLDER_VARIABLE,
    SHARED_THREADS_VARIABLE,
    STOP_SIGNALS,
    LastPhase,
    read_phase,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_PR_SET_PDEATHSIG = 1


def hide_progress_bars() -> None:
    """Keep transformers from drawing a bar for every checkpoint it reads or writes."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def share_processors() -> None:
    """Let waiting threads yield their processor soon; call it before torch is imported.

    OpenMP threads spin while they wait. On a machine with other work the spinning thread keeps
    the processor from the one it waits for, and two threads become ten times slower than one.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "100")


def is_worker() -> bool:
    """Return whether a launcher has already assigned this process a rank."""
    return "RANK" in os.environ


def free_port() -> int:
    """Return a TCP port of this machine on which nobody listens at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def become_only_process() -> None:
    """Set the environment variables of a process group of one; keep those already set."""
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in alone.items():
        os.environ.setdefault(name, value)


def launch(module: str, arguments: Sequence[str], *, nproc_per_node: int) -> int:
    """Run `python -m module arguments` in several processes of this machine and wait for them.

    Returns:
        0.

    Raises:
        WorkerError: A process failed; message and code are those of the first one.
        KeyboardInterrupt: The user stopped the run; all processes have ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from lightrft.engines.process_state import replaced_environment
    from lightrft.utils.scratch import scratch_folder

    # The agent reports a failed worker in a whole page; ours is one line.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with scratch_folder() as scratch:
        phases = scratch / "phases"
        phases.mkdir()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc_per_node,
            # Otherwise the agent makes another folder and leaves it behind.
            logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "agent")),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            # The agent would kill the workers 30 s after one of the others.
            signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
        )
        try:
            variables = {LAUNCHED_BY_LIGHTRFT: "1", PHASE_FOLDER_VARIABLE: str(phases)}
            variables |= _shared_threads(nproc_per_node)
            with replaced_environment(variables), passing_on(STOP_SIGNALS):
                elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as failed:
            raise worker_error(failed.failures, phases=phases) from None
        except SignalException as stopped:
            if stopped.sigval.name == "SIGINT":
                raise KeyboardInterrupt from None
            raise WorkerError(f"stopped by {stopped.sigval.name}", ExitCode.TERMINATED) from None
    return ExitCode.OK


def _shared_threads(nproc_per_node: int) -> dict[str, str]:
    """Return variables with each process's share of the cores; keep the user's OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    share = max(1, (os.cpu_count() or 1) // nproc_per_node)
    return {"OMP_NUM_THREADS": str(share), SHARED_THREADS_VARIABLE: "1"}


@contextmanager
def passing_on(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Pass these signals to the child processes instead of ending.

    Raises:
        WorkerError: A signal came before there was a child process.
    """
    import psutil

    def pass_on(number: int, frame: FrameType | None) -> None:
        workers = psutil.Process().children()
        if not workers:
            name = signal.Signals(number).name
            raise WorkerError(f"stopped by {name} before the run started", ExitCode.TERMINATED)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_launcher() -> None:
    """Have the kernel end this process when its parent is gone (Linux).

    Without it the workers of a killed launcher would go on writing into the run's folder.
    """
    if LAUNCHED_BY_LIGHTRFT in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def worker_error(failures: dict[int, ProcessFailure], *, phases: Path | None = None) -> WorkerError:
    """Return the first failure: others are mostly peers that lost their connection to it.

    Args:
        failures: Failures by rank.
        phases: Folder of the processes' last phases.
    """
    rank = min(failures, key=lambda rank: _failed_at(failures[rank]))
    failure = failures[rank]
    report = failure.error_file_data.get("message")
    if isinstance(report, dict) and "errorCode" in report:
        code, text = int(report["errorCode"]), str(report["message"])
        # All ranks agreed to stop: none of them is to blame.
        return WorkerError(text if code == ExitCode.STOPPED else f"rank {rank}: {text}", code)
    return _unreported_end(rank, failure, read_phase(phases, rank) if phases else None)


def _unreported_end(rank: int, failure: ProcessFailure, phase: LastPhase | None) -> WorkerError:
    """Return the error of a process that was killed, or whose interpreter was stuck."""
    code: int = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    where = "" if phase is None else f" in phase {phase.name!r}"
    if failure.exitcode == 1 and phase is not None and phase.expires_unix < time.time():
        return WorkerError(
            f"deadline: rank {rank} was stuck{where}; its stacks are above", ExitCode.DEADLINE
        )
    if failure.exitcode == -signal.SIGKILL:
        hint = "; the system does so when the memory of the machine or of the job is used up"
        return WorkerError(f"rank {rank} was killed{where} (SIGKILL){hint}", code)
    how = failure.message if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return WorkerError(f"rank {rank} ended without a word{where}: {how}", code)


def _failed_at(failure: ProcessFailure) -> tuple[int, float]:
    """Return a sort key: errors of a process itself and unreported deaths, by their time; then
    reports that another process is gone; then processes that were only ended.
    """
    report = failure.error_file_data.get("message")
    if isinstance(report, dict) and "seconds" in report:
        has_lost_peer = words_of_lost_peer(str(report.get("message", ""))) is not None
        return (int(has_lost_peer), float(report["seconds"]))
    return (2 * (failure.exitcode == -signal.SIGTERM), float(failure.timestamp))

"""Running a function on several gloo ranks, for tests."""

import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from lightrft.engines.process_state import replaced_environment

# Imported once, in the process that ranks are forked from: each rank would take five seconds.
_PRELOADED = ["torch.distributed.tensor", "transformers.modeling_utils"]


class RankFailure(RuntimeError):
    """A rank raised, died or did not finish in time; the message has every rank's traceback."""


def find_free_port():
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _load_function(file, qualified_name):
    """Loads a module from its file: tests are no packages, so they have no importable name."""
    name = f"_rank_function_{abs(hash(file))}"
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    found = module
    for part in qualified_name.split("."):
        found = inspect.getattr_static(found, part)
    if not callable(found):
        raise TypeError(f"{qualified_name} in {file} is not a function")
    return found


def _fork_server():
    """Starts ranks by forking a process that has imported torch and never started a thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with replaced_environment({"OMP_NUM_THREADS": "1"}):  # read while libraries are imported
        forkserver.ensure_running()
    return context


def _run_rank(environment, function, args, reply, outputs):
    gc.freeze()  # what the server has imported is no garbage: collections need not walk it
    # The server keeps the environment, the output and the errors with which it was started.
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, stream in enumerate(outputs, start=1):
        os.dup2(stream.fileno(), descriptor)
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    try:
        value = _load_function(*function)(rank, world_size, *args)
        # Pickled here, by value: torch's own pickler would pass handles to shared memory that
        # vanish with this process.
        reply.send_bytes(pickle.dumps((True, value)))
    except BaseException:  # noqa: BLE001 - reported to the parent with its traceback
        reply.send_bytes(pickle.dumps((False, traceback.format_exc())))
        reply.close()
        # A peer may wait in a collective, so an orderly shutdown could wait for it.
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _collect(processes, replies, deadline):
    results = {}
    failures = {}
    waiting = {reply: rank for rank, reply in enumerate(replies)}
    while waiting and time.monotonic() < deadline:
        for reply in multiprocessing.connection.wait(list(waiting), timeout=0.2):
            rank = waiting.pop(reply)
            try:
                is_ok, value = pickle.loads(reply.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                code = processes[rank].exitcode
                is_ok, value = False, f"died with exit code {code} and without a traceback"
            if is_ok:
                results[rank] = value
            else:
                failures[rank] = value
                # Peers that wait for the failed rank get a moment to report their own error.
                deadline = min(deadline, time.monotonic() + 3.0)
    for rank in waiting.values():
        failures[rank] = "did not finish" if failures else "did not finish before the deadline"
    return results, failures


def rank_environment(rank, world_size, port):
    """What a launcher tells a rank of one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "OMP_NUM_THREADS": "1",
    }


def run_multiprocess(fn, world_size, *, timeout_seconds=60.0, args=()):
    """Runs `fn(rank, world_size, *args)` in `world_size` new processes.

    Each gets the caller's environment with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS=1, as from torchrun. The function starts the
    process group itself.

    Args:
        fn: A function at the top level of a file.
        world_size: Number of processes.
        timeout_seconds: All processes are killed after this, times LIGHTRFT_TEST_TIME_FACTOR.
        args: Further arguments; must be picklable.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankFailure: A rank raised (its traceback is in the message), died or did not finish.
    """
    function = (str(Path(inspect.getfile(fn)).resolve()), fn.__qualname__)
    context = _fork_server()
    # Held here, as torchrun does: rank 0 may end while others still start their groups.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    held_here = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    outputs = tuple(Connection(os.dup(descriptor), readable=False) for descriptor in (1, 2))
    receivers, senders = zip(*(context.Pipe(duplex=False) for _ in range(world_size)), strict=True)
    processes = [
        context.Process(
            target=_run_rank,
            args=(
                {**os.environ, **rank_environment(rank, world_size, store.port), **held_here},
                function,
                args,
                senders[rank],
                outputs,
            ),
        )
        for rank in range(world_size)
    ]
    slowness = float(os.environ.get("LIGHTRFT_TEST_TIME_FACTOR", "1"))
    deadline = time.monotonic() + slowness * timeout_seconds
    failures = None
    try:
        for process in processes:
            process.start()
        for connection in (*senders, *outputs):
            connection.close()
        results, failures = _collect(processes, receivers, deadline)
    finally:
        for process in processes:
            process.join(10 if failures == {} else 0)
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        first = f"{fn.__qualname__} failed on {len(failures)} of {world_size} ranks"
        parts = [f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())]
        raise RankFailure("\n".join([first, *parts]))
    return [results[rank] for rank in range(world_size)]

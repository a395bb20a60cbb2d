"""Two ranks are killed by SIGKILL at random moments of saving; what is there loads every time."""

import contextlib
import importlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.machine import seconds
from tests.ranks import find_free_port, rank_environment, run_multiprocess

pytestmark = pytest.mark.shard("strategies")

NUM_TRIES = 20
NUM_VALUES = 50_000


def start_rank(rank, port, task):
    """Forks a process that runs `task` as one of two ranks; the parent never starts threads."""
    child = os.fork()
    if child:
        return child
    os.environ.update(rank_environment(rank, 2, port))
    code = 1
    try:
        task(rank)
        code = 0
    finally:
        os._exit(code)


def start(*, is_async):
    import torch

    from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy

    strategy = FSDPV2Strategy(1, 1.0, 1, 2, args={"async_save": is_async, "bf16": False})
    model = strategy.prepare_model(torch.nn.Linear(NUM_VALUES, 2, bias=False), is_training=True)
    return strategy, model, strategy.create_optimizer(model)


def save_forever(folder, first, *, is_async):
    """Checkpoint n holds the number n in every weight; `acknowledged` is the last that returned."""

    def task(rank):
        import torch

        strategy, model, optimizer = start(is_async=is_async)
        n = first
        while True:
            with torch.no_grad():
                model.weight.to_local().fill_(n)
            strategy.save_ckpt(
                model, str(folder), f"n{n}", 2, client_state={"n": n}, optimizer=optimizer
            )
            if is_async:
                # The one before is complete as soon as the next may begin.
                strategy.finish_saving()
            if rank == 0:
                (folder.parent / "acknowledged.tmp").write_text(str(n))
                (folder.parent / "acknowledged.tmp").replace(folder.parent / "acknowledged")
            n += 1

    return task


def load_newest(folder):
    def task(rank):
        strategy, model, optimizer = start(is_async=False)
        _, state = strategy.load_ckpt(model, str(folder), optimizer=optimizer)
        assert bool((model.weight.to_local() == state["n"]).all()), state
        if rank == 0:
            (folder.parent / "loaded").write_text(str(state["n"]))
        strategy.close()

    return task


def wait_for(children):
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def import_what_a_rank_imports(file):
    """So that forked processes start with all modules there."""

    def task(rank):
        strategy, _, _ = start(is_async=False)
        file.with_name(f"{file.name}{rank}").write_text("\n".join(sys.modules))
        strategy.close()

    port = find_free_port()
    assert wait_for([start_rank(r, port, task) for r in range(2)]) == [0, 0]
    for name in file.with_name(f"{file.name}0").read_text().split("\n"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def acknowledged(folder):
    file = folder.parent / "acknowledged"
    return int(file.read_text()) if file.exists() else 0


def kill_and_load(rank, world_size, folder, is_async):
    """(acknowledged, loaded) of every try, and how many kills fell into the middle of a save."""
    import torch

    torch.set_num_threads(1)
    folder = Path(folder)
    import_what_a_rank_imports(folder.parent / "modules")
    found = []
    num_in_the_middle = 0
    for _ in range(NUM_TRIES):
        before = acknowledged(folder)
        port = find_free_port()
        task = save_forever(folder, before + 2, is_async=is_async)
        children = [start_rank(r, port, task) for r in range(2)]
        deadline = time.monotonic() + seconds(120)
        while acknowledged(folder) == before:
            assert time.monotonic() < deadline, "no checkpoint within two minutes"
            time.sleep(0.002)
        time.sleep(random.random() * 0.2)
        for child in children:
            os.kill(child, signal.SIGKILL)
        assert wait_for(children) == [-signal.SIGKILL] * 2
        num_in_the_middle += any(folder.glob(".lightrft-*"))
        port = find_free_port()
        assert wait_for([start_rank(r, port, load_newest(folder)) for r in range(2)]) == [0, 0]
        found.append((acknowledged(folder), int((folder.parent / "loaded").read_text())))
    return found, num_in_the_middle


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_async", [False, True])
def test_the_newest_complete_checkpoint_loads_after_every_kill(tmp_path, is_async):
    ((found, num_in_the_middle),) = run_multiprocess(
        kill_and_load, 1, timeout_seconds=1500, args=(str(tmp_path / "ckpt"), is_async)
    )
    assert len(found) == NUM_TRIES
    for last, loaded in found:
        # The one after the last acknowledged may have been completed just before the kill.
        assert loaded in (last, last + 1)
    # Without this the kills would have proven nothing.
    assert num_in_the_middle > 0

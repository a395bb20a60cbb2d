"""Runs whose ranks are forked from a process that has imported everything."""

import os
import signal
import sys
import time
from pathlib import Path

from tests import machine
from tests.ranks import find_free_port, rank_environment


class Ranks:
    """Forked ranks of one run.

    Args:
        options: Of the run.
        world_size: Ranks.
        prepare: Called in each rank before the run begins, with its number; or None.
    """

    def __init__(self, options, world_size=2, prepare=None):
        self.world_size, self._prepare = world_size, prepare
        folder = Path(options["output_dir"])
        self.log = folder.with_name(f"{folder.name}.log")
        port = find_free_port()
        self.codes = {self._fork(rank, port, options): None for rank in range(world_size)}

    def _fork(self, rank, port, options):
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            with self.log.open("a") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            os.environ.update(rank_environment(rank, self.world_size, port))
            from lightrft.config import TrainConfig
            from lightrft.run.assembly import run_training

            if self._prepare is not None:
                self._prepare(rank)
            given = dict(options)
            stage = given.pop("stage", "policy")
            run_training(TrainConfig(**given), stage=stage)
            self.log.with_suffix(".modules").write_text("\n".join(sys.modules))
            code = 0
        except BaseException as error:  # noqa: BLE001 - the parent reads the log
            print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)

    def running(self):
        for child, code in self.codes.items():
            if code is None:
                found, status = os.waitpid(child, os.WNOHANG)
                self.codes[child] = os.waitstatus_to_exitcode(status) if found else None
        return [child for child, code in self.codes.items() if code is None]

    def wait(self, seconds):
        """Exit codes by rank; None for one that did not end in time."""
        limit = time.monotonic() + machine.seconds(seconds)
        while self.running() and time.monotonic() < limit:
            time.sleep(0.01)
        return list(self.codes.values())

    def kill(self, children):
        for child in children:
            os.kill(child, signal.SIGKILL)
        # A survivor loses its connection and ends; it may also wait until its deadline.
        self.wait(2.0)
        for child in self.running():
            os.kill(child, signal.SIGKILL)
        self.wait(30.0)

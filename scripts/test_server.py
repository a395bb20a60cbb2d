"""Runs pytest again and again in forks of a process that has imported the large packages.

`kill_table.py` starts it in a clone. Each line of the input is a JSON object with pytest's
arguments and the seconds after which a run is killed; each line of the output is its exit code,
-1 of one that was killed. The packages under test are imported by each fork anew.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys

LARGE = ("torch", "torch.distributed.tensor", "transformers.modeling_utils", "pytest")


def run_tests(arguments: list[str]) -> None:
    """Run pytest in this process and end it."""
    os.setsid()
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    import pytest

    code = 1
    try:
        code = int(pytest.main(arguments))
    finally:
        os._exit(code)


def wait_for(child: int, seconds: float) -> int:
    """Return the exit code of a child, -1 after killing it and all that it started."""
    with open(os.pidfd_open(child)) as handle:
        has_ended = bool(select.select([handle], [], [], seconds)[0])
    if not has_ended:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if has_ended else -1


def main() -> None:
    """Serve until the input ends."""
    sys.path.insert(0, os.getcwd())
    for name in LARGE:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            run_tests(request["arguments"])
        sys.stdout.write(f"{wait_for(child, request['seconds'])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

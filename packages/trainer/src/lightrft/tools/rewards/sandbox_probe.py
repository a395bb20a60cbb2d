"""Whether a sandbox holds: a program that looks for ways out, and what it must not find."""

import json
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

_PROGRAM = """
import json, os, resource, socket, sys
port, canary, is_unsafe = {values}
def connects():
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True
def writes(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
def unshares():
    import ctypes
    return ctypes.CDLL(None).unshare(0x10000000) == 0
processes = [name for name in os.listdir("/proc") if name.isdigit()]
found = dict() if is_unsafe else {{
    "reaches a listener of this machine": connects(),
    "sees a file outside": os.path.exists(canary),
    "writes outside its folder": writes("/lightrft-canary") or writes("/proc/sys/vm/drop_caches"),
    "runs as root": os.getuid() == 0,
    "sees other processes": len(processes) > 2,
    "makes user namespaces": unshares(),
}}
for name in "AS", "CPU", "NPROC", "FSIZE":
    limit = resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
    found["has no limit " + name] = limit == resource.RLIM_INFINITY
print("probe", json.dumps([name for name in found if found[name]]))
"""


@contextmanager
def probe_program(*, is_unsafe: bool) -> Iterator[bytes]:
    """The source of the program, while there is a listener and a file that it must not reach."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        tempfile.NamedTemporaryFile(prefix="lightrft-canary-") as canary,
    ):
        Path(canary.name).chmod(0o644)
        values = repr((listener.getsockname()[1], canary.name, is_unsafe))
        yield _PROGRAM.format(values=values).encode()


def probe_verdict(stdout: bytes) -> str | None:
    """What is wrong by what the program printed; None if nothing is."""
    first, _, rest = stdout.strip().partition(b" ")
    if first != b"probe":
        return "a program did not run in it"
    found = cast("list[str]", json.loads(rest))
    return f"a program in it {found[0]}" if found else None

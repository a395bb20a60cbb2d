"""System calls that a sandbox refuses because their memory or time cannot be counted from outside.

Memory that no process has mapped appears in no file of `/proc`. Calls that make such memory are
refused, so the rest can be counted. The kernel runs the filter (seccomp, classic BPF), which sees
only numbers, never memory.
"""

import errno
import mmap
import os
import socket
import struct
from pathlib import Path

from lightrft.config.files import typed
from lightrft.config.toml import read_toml

_FILE = Path(__file__).with_name("syscalls.toml")
# Refused calls, calls refused if time is counted, and calls without effect then. Each has its
# number on x86_64 and on machines that use Linux's common table; -1 is none.
_CALLS = typed(dict[str, dict[str, tuple[int, int]]], read_toml(_FILE), _FILE)
_SETSOCKOPT, _MMAP, _MADVISE = (54, 208), (9, 222), (28, 233)
# Huge pages stay whole while a page of them is mapped.
_HUGE = (mmap.MADV_HUGEPAGE, 25)
_SOCKETS = ((41, 198), (53, 199))
# Other families, such as AF_VSOCK, leave the namespace or make the kernel do the work.
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
# AUDIT_ARCH_* and the column of the tables.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1), "riscv64": (0xC00000F3, 1)}
# x86_64 has a second table of calls from this number on.
_OTHER_TABLE = 0x40000000

_Instruction = tuple[int, int, int, int]
_LOAD, _EQUAL, _MORE, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_ALLOW: _Instruction = (_RETURN, 0, 0, 0x7FFF0000)
_KILL: _Instruction = (_RETURN, 0, 0, 0x80000000)
_NUMBER: _Instruction = (_LOAD, 0, 0, 0)
_ARCHITECTURE: _Instruction = (_LOAD, 0, 0, 4)


def has_filter() -> bool:
    """Return whether the calls of this kind of machine are known."""
    return os.uname().machine in _MACHINES


def refused_numbers(*, is_counted: bool) -> dict[str, int]:
    """Return the calls that `call_filter` always refuses, with their numbers on this machine."""
    column = _MACHINES[os.uname().machine][1]
    named = {**_CALLS["refused"], **(_CALLS["refused_if_counted"] if is_counted else {})}
    return {name: each[column] for name, each in named.items() if each[column] >= 0}


def call_filter(*, is_counted: bool, shared_bytes: int) -> bytes:
    """Return the filter of a program in the format of `bwrap --seccomp`.

    Args:
        is_counted: Whether processor time limits the program; calls that change its priority then
            have no effect.
        shared_bytes: Size of the largest shared mapping without a file; it keeps all its memory
            while any page is mapped.
    """
    architecture, column = _MACHINES[os.uname().machine]
    program = [_ARCHITECTURE, (_EQUAL, 1, 0, architecture), _KILL, _NUMBER]
    if os.uname().machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _OTHER_TABLE), _error(errno.ENOSYS)]
    for number in refused_numbers(is_counted=is_counted).values():
        program += _for(number, [_error(errno.ENOSYS)])
    large = [_load(1, 4), (_EQUAL, 0, 2, 0), _load(1), (_MORE, 0, 1, shared_bytes)]
    program += _for(
        _MMAP[column],
        [
            *(_load(3), (_HAS_BITS, 0, len(large) + 2, mmap.MAP_ANONYMOUS)),
            *((_HAS_BITS, 0, len(large) + 1, mmap.MAP_SHARED), *large),
            *(_error(errno.ENOMEM), _ALLOW),
        ],
    )
    huge = [_load(2), (_EQUAL, 1, 0, _HUGE[0]), (_EQUAL, 0, 1, _HUGE[1])]
    program += _for(_MADVISE[column], [*huge, _error(errno.EINVAL), _ALLOW])
    families = _unless(0, _FAMILIES, _error(errno.EAFNOSUPPORT))
    for numbers in _SOCKETS:
        program += _for(numbers[column], families)
    # Buffers keep their size without an error; the kernel also grants less silently.
    sizes = [*_unless(1, (socket.SOL_SOCKET,), _ALLOW)[:-1]]
    grows = [_load(2), (_EQUAL, 1, 0, socket.SO_SNDBUF), (_EQUAL, 0, 1, socket.SO_RCVBUF)]
    program += _for(_SETSOCKOPT[column], [*sizes, *grows, _error(0), _ALLOW])
    if is_counted:
        for numbers in _CALLS["without_effect"].values():
            program += _for(numbers[column], [_error(0)])
    return b"".join(struct.pack("HBBI", *each) for each in [*program, _ALLOW])


def _for(number: int, body: list[_Instruction]) -> list[_Instruction]:
    """Return instructions that run the body for one call; every path of the body returns."""
    return [(_EQUAL, 0, len(body), number), *body]


def _load(argument: int, offset: int = 0) -> _Instruction:
    """Return the load of an argument's lower half; with offset 4, of its upper half."""
    return (_LOAD, 0, 0, 16 + 8 * argument + offset)


def _unless(argument: int, values: tuple[int, ...], result: _Instruction) -> list[_Instruction]:
    """Return instructions that allow a call with one of the values, else give the result."""
    jumps = [(_EQUAL, len(values) - place, 0, int(value)) for place, value in enumerate(values)]
    return [_load(argument), *jumps, result, _ALLOW]


def _error(number: int) -> _Instruction:
    """Return the instruction that skips the call and returns this error; 0 pretends success."""
    return (_RETURN, 0, 0, 0x00050000 | number)

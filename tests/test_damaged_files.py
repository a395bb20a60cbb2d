"""Every reader of files takes what is damaged in one line of its documented error, or reads it.

The readers are the rows of `READERS` in file_readers.py. Each is given mutations of a valid file in
a process of its own, whose memory is limited.
"""

import importlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import stat
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.file_readers import READERS
from tests.machine import seconds
from tests.ranks import run_multiprocess

# Of the shard, 3,000 a reader; by default few.
EXAMPLES = int(os.environ.get("LIGHTRFT_FUZZ_EXAMPLES", "0")) * 3 // 2 or 40
MEMORY_BYTES, SECONDS = 2**30, 10.0
pytestmark = [pytest.mark.shard("fuzz_files"), pytest.mark.timeout(300 + 2 * EXAMPLES)]


# ---- mutations ----

HOSTILE = [
    None, True, [], {}, "", "x", "../../etc", "a\0b", "\x1b[2J", "\ud800", 0, -1, 1.5, 2**31, 2**63,
    10**30, 1e308, float("nan"), float("inf"), -float("inf"), [[]], [None], ["x"], {"x": 1}, "²",
    "9" * 5000, "x" * 10**5, {"auto_map": {"AutoConfig": "m.C"}},
]  # fmt: skip
DEEP = ("[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900)


def mutate_bytes(draw, content):
    content = bytearray(content)
    place = draw.randrange(len(content)) if content else 0
    kind = draw.randrange(9)
    if kind == 0:
        for _ in range(draw.choice((1, 1, 3, 20))):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del content[place:]
    elif kind == 2:
        content[place:place] = draw.randbytes(draw.choice((1, 3, 50)))
    elif kind == 3:
        del content[place : place + draw.choice((1, 4, 40))]
    elif kind == 4:
        content[place:place] = content[place : place + draw.choice((1, 8, 200))]
    elif kind == 5:
        content[place:place] = draw.choice((b"\xff\xfe", b"\x00", b"\xed\xa0\x80", b"\x1b[2J"))
    elif kind == 6:
        content[place : place + 8] = draw.choice((2**60, 2**63 - 1, 2**32, 0)).to_bytes(8, "little")
    elif kind == 7:
        return draw.choice((b"", *(deep.encode() for deep in DEEP), b"\n\n", b"[]", b"{}", b"7"))
    else:
        numbers = [m.span() for m in re.finditer(rb"-?\d+(\.\d+)?", bytes(content))]
        if numbers:
            start, stop = draw.choice(numbers)
            content[start:stop] = draw.choice(
                (b"NaN", b"-1", b"9" * 5000, b"1e999", b"null", b"12345678901234567890", b'"7"')
            )
    return bytes(content)


def _places(value, at=()):
    yield at
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in list(items)[:50]:
        yield from _places(item, (*at, key))


def mutate_json(draw, text):
    """Another value, no value, or one more at some place."""
    value = json.loads(text)
    *path, last = draw.choice([p for p in _places(value) if p] or [(None,)])
    if last is None:
        return json.dumps(draw.choice(HOSTILE))
    parent = value
    for key in path:
        parent = parent[key]
    kind, odd = draw.randrange(6), draw.choice(HOSTILE)
    if kind < 3:
        parent[last] = odd
    elif kind == 3:
        del parent[last]
    elif isinstance(parent, dict):
        parent[draw.choice(("x", "../../../etc", "²", "", "auto_map", "sha256"))] = odd
    else:
        parent[last:last] = [parent[last]] * draw.choice((1, 30))
    made = json.dumps(value)
    if kind == 5 and isinstance(parent, dict):
        made = made.replace("{", '{"step": 3, "step": [],', 1)
    return made


def mutate_arrays(draw, path):
    """Other numbers, shapes, types or names in a safetensors file."""
    from safetensors.torch import load_file, save_file

    arrays = load_file(path)
    name = draw.choice(sorted(arrays))
    array, kind = arrays.pop(name), draw.randrange(7)
    if kind == 0:
        arrays[name] = array[: len(array) // 2].clone() if array.dim() else array
    elif kind == 1:
        arrays[name] = -array if array.dtype.is_signed else ~array
    elif kind == 2:
        arrays[name] = array.double() if array.dtype.itemsize < 8 else array.float()
    elif kind == 3:
        arrays[name] = array[None].clone()
    elif kind == 4:
        arrays[draw.choice(("x", "update/²/new", "fact/../x", "weight/x"))] = array
    elif kind == 5:
        arrays[name] = array * draw.choice((10**6, 0))
    save_file(arrays, path)


# What no reader waits for, or reads without end.
SPECIAL = {
    "a pipe": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def mutate(draw, path, has_seal):
    """Damages a file; True if checksums shall be made true again."""
    kind = draw.random()
    content = path.read_bytes()
    if kind < 0.02:
        path.unlink()
        path.mkdir()
    elif kind < 0.03:
        path.unlink()
    elif kind < 0.5 and path.suffix == ".json":
        path.write_text(mutate_json(draw, content))
        return has_seal
    elif kind < 0.5 and path.suffix == ".jsonl":
        lines = content.decode().splitlines()
        number = draw.choice([i for i, line in enumerate(lines) if line.strip()])
        lines[number] = mutate_json(draw, lines[number])
        path.write_text("\n".join(lines) + "\n")
        return has_seal
    elif kind < 0.5 and path.suffix == ".safetensors":
        mutate_arrays(draw, path)
        return has_seal
    else:
        path.write_bytes(mutate_bytes(draw, content))
        return has_seal and kind < 0.75
    return False


# ---- what comes of it ----


def problem_of(reader, folder):
    """Why the outcome is none that may be; None if it is one."""
    from lightrft.cli.errors import describe, exit_code_of
    from lightrft.config.printable import printable

    try:
        reader.read(folder)
    except Exception as error:  # noqa: BLE001
        classes = []
        for text in reader.errors:
            module, _, name = text.partition(":")
            classes.append(getattr(importlib.import_module(module), name))
        where = traceback.extract_tb(error.__traceback__)[-1]
        shown = f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"
        text = printable(describe(error))
        if not isinstance(error, tuple(classes)) or len(text) > 10_000:
            return shown
        # Options have a line for each problem.
        several = "\n" in text.strip() and not text.startswith("invalid configuration:\n")
        if reader.code != 1 and (exit_code_of(error) != reader.code or several):
            return f"code {exit_code_of(error)}, {len(text.splitlines())} lines: {shown}"
    return None


@contextmanager
def limit(nominal):
    def stop(number, frame):
        raise TimeoutError("too slow")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds(nominal))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def damage(rank, world_size, name, folder, count):
    """Runs in a process of its own; returns what went wrong."""
    import warnings

    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    reader, folder, problems = READERS[name], Path(folder), []
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    reader.read(folder)
    status = Path("/proc/self/status").read_text()
    size = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
    valid = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    special = list(itertools.product(reader.files, SPECIAL))
    for number in (*special, *range(count)):
        draw = random.Random(f"{name} {number}")
        path = folder / (draw.choice(reader.files) if isinstance(number, int) else number[0])
        if not isinstance(number, int):
            path.unlink()
            SPECIAL[number[1]](path)
        elif mutate(draw, path, reader.seal is not None):
            reader.seal(folder)
        try:
            with limit(SECONDS):
                found = problem_of(reader, folder)
        except TimeoutError:
            found = "TimeoutError: too slow"
        if found is not None:
            problems.append(f"{number}: {found}")
        for each in (path, *valid):
            if each.is_dir():
                shutil.rmtree(each)
            elif not each.is_file() or each.is_symlink():
                each.unlink(missing_ok=True)
            if not each.exists() or each == path or reader.seal is not None:
                each.write_bytes(valid[each])
    return problems


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Folders of valid files, one for each maker."""
    folders = {}

    def of(reader):
        if reader.make not in folders:
            folders[reader.make] = tmp_path_factory.mktemp("valid")
            reader.make(folders[reader.make])
        return folders[reader.make]

    return of


@pytest.mark.cover(3)
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused_in_one_line(made, tmp_path, name):
    reader = READERS[name]
    folder = shutil.copytree(made(reader), tmp_path / "files")
    (problems,) = run_multiprocess(
        damage, 1, timeout_seconds=120 + 2 * EXAMPLES, args=(name, str(folder), EXAMPLES)
    )
    assert not problems, f"{len(problems)} of {EXAMPLES}:\n" + "\n".join(problems)

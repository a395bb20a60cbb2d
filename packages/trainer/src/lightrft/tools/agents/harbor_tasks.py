"""Tasks in Harbor's folders: an instruction, files to work on, and tests that write the reward.

Format: `instruction.md`, `task.toml` (schema version 1.4), `environment/` and `tests/test.sh` of
https://github.com/laude-institute/harbor, version 0.24. No container is built: files that a
Dockerfile copies are copied, and a task that needs anything else is refused by name.
"""

from __future__ import annotations

import io
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

from lightrft.config import ConfigError
from lightrft.config.files import FileError, read_bytes, read_text
from lightrft.config.toml import read_toml
from lightrft.datasets.types import DataError, LeftOutError

PREFIX, COLUMN = "harbor:", "harbor"
# Limit of a task's files, and of its tests.
_MAX_BYTES = 32 << 20
TESTS, LOGS = "/tests", "/logs"
_SYSTEM = frozenset(
    ("bin", "dev", "lib", "lib32", "lib64", "logs", "proc", "sbin", "sys", "tests", "tmp", "usr")
)
# This machine's /usr, with its Python, replaces them.
_IMAGES = ("debian", "python", "ubuntu")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "agent": ("timeout_sec",),
    "verifier": ("timeout_sec", "env"),
    # Nothing is built, and the sandbox's limits hold.
    "environment": (
        *("build_timeout_sec", "cpus", "memory", "memory_mb", "storage", "storage_mb"),
        *("env", "workdir"),
    ),
}
_REMARKS = ("schema_version", "version", "source", "task", "metadata", "solution")
# Values that other keys may have, since they hold here.
_HOLDS = {"network_mode": "no-network", "os": "linux", "environment_mode": "shared"}
# Forms of instructions that are followed, and of those that only concern the container.
_FORMS: Mapping[str, str] = {
    "FROM": r"[^\s$]+",
    "WORKDIR": r"[^\s$]+",
    "COPY": r"[^-\s\[*?$][^\[*?$]*\s[^\[*?$]+",
    "ENV": r"\w+=[^$]*",
    **dict.fromkeys(("LABEL", "CMD", "EXPOSE", "MAINTAINER"), ".*"),
}
_DONE = ("FROM", "WORKDIR", "COPY", "ENV")
_INSTALLS = re.compile(r"\b(apt|apt-get|apk|dnf|yum|conda|curl|wget|git|npm|npx|pip|pip3|uv|uvx)\s")


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task to play.

    Args:
        folder: Folder of the task.
        instruction: Instruction to the agent.
        workdir: Working directory of agent and tests.
        copies: (file, place in the sandbox) pairs of its environment.
        variables, test_variables: Variables of agent and tests, and of tests alone.
        agent_seconds: Deadline of the agent, whose files are then tested; None is no deadline.
        test_seconds: Deadline of the tests.
    """

    folder: Path
    instruction: str
    workdir: PurePosixPath
    copies: Sequence[tuple[Path, PurePosixPath]]
    variables: Mapping[str, str]
    test_variables: Mapping[str, str]
    agent_seconds: float | None
    test_seconds: float

    @property
    def folders(self) -> list[str]:
        """Top-level folders that the agent may write to."""
        tops = {path.parts[1] for path in (self.workdir, *(where for _, where in self.copies))}
        return sorted(f"/{top}" for top in tops)


def task_rows(text: str, split: str) -> Iterator[Mapping[str, object] | LeftOutError]:
    """Yield a row for each task: `input` (instruction), `task` (name) and `harbor` (folder).

    A task that cannot be played without containers yields the reason instead.

    Args:
        text: `harbor:FOLDER`, the folder of a task or of several task folders.
        split: Ignored: all tasks are in each split.

    Raises:
        DataError: There is no task.
    """
    del split
    folder = Path(text.removeprefix(PREFIX)).absolute()
    paths = [folder] if (folder / "task.toml").is_file() else sorted(folder.glob("*/task.toml"))
    if not paths:
        raise DataError(f"{text}: found no task.toml in it or in a folder of it")
    for path in paths:
        try:
            task = read_task(path if path.is_dir() else path.parent)
        except DataError as error:
            yield LeftOutError(str(error))
            continue
        yield {"input": task.instruction, "task": task.folder.name, COLUMN: str(task.folder)}


def read_task(folder: Path) -> HarborTask:
    """Return the task of a folder.

    Raises:
        DataError: It is no task, or needs something that the sandbox lacks.
    """
    try:
        return _read(folder)
    except (ConfigError, DataError, FileError, OSError) as error:
        raise DataError(f"task {folder.name}: {error}") from error


def packed(files: Sequence[tuple[Path, PurePosixPath]]) -> bytes:
    """Return an archive of files at their places, without owners."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for file, where in files:
            entry = tarfile.TarInfo(str(where).lstrip("/"))
            data = read_bytes(file, max_bytes=_MAX_BYTES)
            entry.size, entry.mode = len(data), file.stat().st_mode & 0o777
            tar.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


def files_of(folder: Path, where: PurePosixPath) -> list[tuple[Path, PurePosixPath]]:
    """Return the files of a folder with their places below `where`.

    Raises:
        DataError: They are too large, or one is a link out of the folder.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    outside = [path for path in paths if not path.resolve().is_relative_to(folder.resolve())]
    if outside:
        raise DataError(f"{outside[0].relative_to(folder)} is a link out of {folder.name}")
    if sum(path.stat().st_size for path in paths) > _MAX_BYTES:
        raise DataError(f"{folder.name} has more than {_MAX_BYTES} bytes")
    return [(path, where / path.relative_to(folder)) for path in paths]


def _read(folder: Path) -> HarborTask:
    tables = _tables(read_toml(folder / "task.toml"))
    _check_tests(folder / "tests")
    environment = folder / "environment"
    image = _Image(environment)
    others = [path.name for path in environment.glob("*compose*")]
    if others:
        raise DataError(f"environment/{others[0]}: services are not supported")
    if (environment / ".dockerignore").exists():
        raise DataError("environment/.dockerignore is not supported")
    if (environment / "Dockerfile").is_file():
        image.read(read_text(environment / "Dockerfile"))
    workdir = tables["environment"].get("workdir") or image.workdir
    if not isinstance(workdir, str | PurePosixPath):
        raise DataError("it has no working directory: expected WORKDIR in environment/Dockerfile")
    variables, tests = _variables(tables, "environment"), _variables(tables, "verifier")
    agent_seconds = _seconds(tables, "agent")
    task = HarborTask(
        folder=folder,
        instruction=read_text(folder / "instruction.md"),
        workdir=PurePosixPath(workdir),
        copies=image.copies,
        variables={**image.variables, **variables},
        test_variables=tests,
        agent_seconds=agent_seconds,
        test_seconds=_seconds(tables, "verifier") or 600.0,
    )
    _check_copies(task)
    for path in (task.workdir, *(where for _, where in task.copies)):
        if not path.is_absolute() or len(path.parts) < 2 or ".." in path.parts:
            raise DataError(f"{path} is no absolute path of a folder")
        if path.parts[1] in _SYSTEM:
            raise DataError(f"{path} lies in a folder that the sandbox has itself")
    return task


def _check_copies(task: HarborTask) -> None:
    """Raise a DataError for impossible places, too large files, or variables of the sandbox."""
    places = [where for _, where in task.copies]
    above = {task.workdir, *task.workdir.parents, *(up for each in places for up in each.parents)}
    if both := sorted(above.intersection(places)):
        raise DataError(f"{both[0]} is a file of COPY and a folder: end a folder's name with /")
    if sum(file.stat().st_size for file, _ in task.copies) > _MAX_BYTES:
        raise DataError(f"environment has more than {_MAX_BYTES} bytes")
    if "PATH" in {**task.variables, **task.test_variables}:
        raise DataError("PATH cannot be set: it is that of the sandbox")


def _tables(given: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the tables of agent, verifier and environment; refuse unsupported entries."""
    tables: dict[str, dict[str, object]] = {}
    for name in _KEYS:
        table = given.get(name, {})
        if not isinstance(table, dict):
            raise DataError(f"task.toml: {name} is no table")
        tables[name] = table
        for key, value in table.items():
            is_so = not value or _HOLDS.get(key) == value
            if key not in _KEYS[name] and not is_so:
                raise DataError(f"task.toml: {name}.{key} is not supported: got {value!r:.80}")
    other = [name for name in given if name not in (*_KEYS, *_REMARKS) and given[name]]
    if other:
        raise DataError(f"task.toml: {other[0]} is not supported")
    return tables


def _variables(tables: Mapping[str, dict[str, object]], name: str) -> dict[str, str]:
    variables = tables[name].get("env") or {}
    values = variables.items() if isinstance(variables, dict) else [("env", None)]
    for key, value in values:
        if not isinstance(value, str) or "$" in value:
            raise DataError(
                f"task.toml: {name}.env.{key}: expected a text without variables of this "
                f"machine, got {value!r:.80}"
            )
    return dict(cast("dict[str, str]", variables))


def _seconds(tables: Mapping[str, dict[str, object]], name: str) -> float | None:
    value = tables[name].get("timeout_sec")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise DataError(f"task.toml: {name}.timeout_sec: expected seconds, got {value!r:.80}")
    return float(value)


def _check_tests(folder: Path) -> None:
    if not (folder / "test.sh").is_file():
        raise DataError("it has no tests/test.sh")
    files_of(folder, PurePosixPath(TESTS))
    for script in sorted(folder.rglob("*.sh")):
        for line in read_text(script).splitlines():
            match = _INSTALLS.search(line.partition("#")[0] + " ")
            if match:
                raise DataError(
                    f"tests/{script.relative_to(folder)} calls {match[1]}: tests have no network, "
                    "and run with what this machine has"
                )


class _Image:
    """Content of an image whose Dockerfile only copies files.

    Args:
        context: Folder of its files.
    """

    def __init__(self, context: Path) -> None:
        self._context = context
        self.workdir: PurePosixPath | None = None
        self.copies: list[tuple[Path, PurePosixPath]] = []
        self.variables: dict[str, str] = {}
        self._image = ""

    def read(self, text: str) -> None:
        """Read the lines of the Dockerfile.

        Raises:
            DataError: A line is not supported.
        """
        lines = re.sub(r"\\\s*\n", " ", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))
        for line in filter(None, map(str.strip, lines.splitlines())):
            name, _, rest = line.partition(" ")
            form = _FORMS.get(name.upper())
            if form is None or not re.fullmatch(form, rest.strip()):
                raise DataError(f"environment/Dockerfile: {line[:100]!r} is not supported")
            try:
                self._take(name.upper(), shlex.split(rest) if name.upper() in _DONE else [])
            except ValueError as error:
                raise DataError(f"environment/Dockerfile: {line[:100]!r}: {error}") from error
        if self._image not in _IMAGES:
            raise DataError(
                f"environment/Dockerfile: the image {self._image or 'of none'} is not to be had: "
                f"expected {', '.join(_IMAGES)}, in whose place there is this machine's /usr"
            )

    def _take(self, name: str, words: Sequence[str]) -> None:
        match name:
            case "FROM":
                if self._image:
                    raise DataError("environment/Dockerfile: several stages are not supported")
                self._image = words[0].partition(":")[0]
            case "WORKDIR":
                self.workdir = (self.workdir or PurePosixPath("/")) / words[0]
            case "COPY":
                self._copy(words[:-1], words[-1])
            case "ENV":
                pairs = [word.partition("=") for word in words]
                if not all(key and equals for key, equals, _ in pairs):
                    raise ValueError("expected NAME=VALUE")
                self.variables |= {key: value for key, _, value in pairs}

    def _copy(self, sources: Sequence[str], target: str) -> None:
        where = (self.workdir or PurePosixPath("/")) / target
        for source in sources:
            name = PurePosixPath(source).name
            path = (self._context / source.lstrip("/")).resolve()
            if not path.exists() or not path.is_relative_to(self._context.resolve()):
                raise DataError(f"environment/Dockerfile: COPY {source}: there is no such file")
            if path.is_dir():
                self.copies += files_of(path, where)
            else:
                is_folder = target.endswith(("/", ".")) or len(sources) > 1
                self.copies.append((path, where / name if is_folder else where))

"""Tasks in Harbor's folders: an instruction, files to work on, and tests that write the reward.

Format: `instruction.md`, `task.toml` (schema version 1.4), `environment/` and `tests/test.sh` of
https://github.com/laude-institute/harbor, version 0.24. No container is built: what a Dockerfile
copies is copied, and a task that asks for anything else is refused with its name.
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
# Of a task's files, and of its tests.
_MAX_BYTES = 32 << 20
TESTS, LOGS = "/tests", "/logs"
_SYSTEM = frozenset(
    ("bin", "dev", "lib", "lib32", "lib64", "logs", "proc", "sbin", "sys", "tests", "tmp", "usr")
)
# In their place there is this machine's /usr, with its Python.
_IMAGES = ("debian", "python", "ubuntu")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "agent": ("timeout_sec",),
    "verifier": ("timeout_sec", "env"),
    # Nothing is built, and the sandbox's own limits hold.
    "environment": (
        *("build_timeout_sec", "cpus", "memory", "memory_mb", "storage", "storage_mb"),
        *("env", "workdir"),
    ),
}
_REMARKS = ("schema_version", "version", "source", "task", "metadata", "solution")
# What other keys may say, since it is so.
_HOLDS = {"network_mode": "no-network", "os": "linux", "environment_mode": "shared"}
# Of the instructions that are done, and of those that are of the container alone.
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
    """A task as it is played.

    Args:
        folder: Its own.
        instruction: What the agent is asked.
        workdir: Where agent and tests run.
        copies: (file, where it is in the sandbox) of its environment.
        variables, test_variables: Of agent and tests, and of tests alone.
        agent_seconds: After which the agent is ended and what it has left is tested; None is never.
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
        """Folders at the top that the agent may write to."""
        tops = {path.parts[1] for path in (self.workdir, *(where for _, where in self.copies))}
        return sorted(f"/{top}" for top in tops)


def task_rows(text: str, split: str) -> Iterator[Mapping[str, object] | LeftOutError]:
    """A row for each task: `input`, its instruction; `task`, its name; and `harbor`, its folder.

    In the place of one that cannot be played without containers stands the reason.

    Args:
        text: `harbor:FOLDER`, a task's or one with folders of tasks.
        split: Has no meaning: all tasks are in each.

    Raises:
        DataError: There is no task.
    """
    del split
    folder = Path(text.removeprefix(PREFIX)).absolute()
    own = [folder] if (folder / "task.toml").is_file() else sorted(folder.glob("*/task.toml"))
    if not own:
        raise DataError(f"{text}: found no task.toml in it or in a folder of it")
    for path in own:
        try:
            task = read_task(path if path.is_dir() else path.parent)
        except DataError as error:
            yield LeftOutError(str(error))
            continue
        yield {"input": task.instruction, "task": task.folder.name, COLUMN: str(task.folder)}


def read_task(folder: Path) -> HarborTask:
    """The task of a folder.

    Raises:
        DataError: It is none, or needs what the sandbox does not have.
    """
    try:
        return _read(folder)
    except (ConfigError, DataError, FileError, OSError) as error:
        raise DataError(f"task {folder.name}: {error}") from error


def packed(files: Sequence[tuple[Path, PurePosixPath]]) -> bytes:
    """An archive of files at their places, as anybody's."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for file, where in files:
            entry = tarfile.TarInfo(str(where).lstrip("/"))
            data = read_bytes(file, max_bytes=_MAX_BYTES)
            entry.size, entry.mode = len(data), file.stat().st_mode & 0o777
            tar.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


def files_of(folder: Path, where: PurePosixPath) -> list[tuple[Path, PurePosixPath]]:
    """The files of a folder with their places below another one.

    Raises:
        DataError: They are too large, or one is a link out of the folder.
    """
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    outside = [path for path in found if not path.resolve().is_relative_to(folder.resolve())]
    if outside:
        raise DataError(f"{outside[0].relative_to(folder)} is a link out of {folder.name}")
    if sum(path.stat().st_size for path in found) > _MAX_BYTES:
        raise DataError(f"{folder.name} has more than {_MAX_BYTES} bytes")
    return [(path, where / path.relative_to(folder)) for path in found]


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
    own, tests = _variables(tables, "environment"), _variables(tables, "verifier")
    agent_seconds = _seconds(tables, "agent")
    task = HarborTask(
        folder=folder,
        instruction=read_text(folder / "instruction.md"),
        workdir=PurePosixPath(workdir),
        copies=image.copies,
        variables={**image.variables, **own},
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
    """Raises a DataError for what can be no file, is too large, or is the sandbox's own."""
    places = [where for _, where in task.copies]
    above = {task.workdir, *task.workdir.parents, *(up for each in places for up in each.parents)}
    if both := sorted(above.intersection(places)):
        raise DataError(f"{both[0]} is a file of COPY and a folder: end a folder's name with /")
    if sum(file.stat().st_size for file, _ in task.copies) > _MAX_BYTES:
        raise DataError(f"environment has more than {_MAX_BYTES} bytes")
    if "PATH" in {**task.variables, **task.test_variables}:
        raise DataError("PATH cannot be set: it is that of the sandbox")


def _tables(given: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The tables of agent, verifier and environment, which say nothing that does not hold."""
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
    given = tables[name].get("env") or {}
    values = given.items() if isinstance(given, dict) else [("env", None)]
    for key, value in values:
        if not isinstance(value, str) or "$" in value:
            raise DataError(
                f"task.toml: {name}.env.{key}: expected a text without variables of this "
                f"machine, got {value!r:.80}"
            )
    return dict(cast("dict[str, str]", given))


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
            found = _INSTALLS.search(line.partition("#")[0] + " ")
            if found:
                raise DataError(
                    f"tests/{script.relative_to(folder)} calls {found[1]}: tests have no network, "
                    "and run with what this machine has"
                )


class _Image:
    """The content of an image whose Dockerfile only copies files.

    Args:
        context: The folder of its files.
    """

    def __init__(self, context: Path) -> None:
        self._context = context
        self.workdir: PurePosixPath | None = None
        self.copies: list[tuple[Path, PurePosixPath]] = []
        self.variables: dict[str, str] = {}
        self._image = ""

    def read(self, text: str) -> None:
        """Takes the lines of the Dockerfile.

        Raises:
            DataError: One of them does more.
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

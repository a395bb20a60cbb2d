"""The files of a run: names, JSON lines and their readers, logs."""

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lightrft.config.files import (
    FileError,
    lines_of,
    named_errors,
    parse_object,
    read_object,
    require_held,
    sealed,
)
from lightrft.config.toml import write_whole

CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TRAJECTORIES_FILE = "trajectories.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
DRAWS_FILE = "draws.jsonl"
SUMMARY_FILE = "summary.json"
START_FILE = "run.json"
REPORT_FILE = "report.html"
EVAL_FILE = "eval.json"
EVENTS_FILE = "events.jsonl"
LOG_FOLDER = "logs"
# Lines of steps, which a continued run appends to from its checkpoint on.
STEP_FILES = (METRICS_FILE, SAMPLES_FILE, TRAJECTORIES_FILE, ROLLOUTS_FILE, DRAWS_FILE)
UNFINISHED_PREFIX = "unfinished_"

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGES = ("lightrft-trainer", "torch", "transformers", "deepspeed", "vllm", "sglang")


def write_start(path: Path, *, world_size: int, **facts: object) -> None:
    """Write when a run started, with how many processes and versions, and further facts.

    The file ends with a hash of all the rest.
    """
    python = ".".join(map(str, sys.version_info[:3]))
    start = {
        "started_unix": time.time(),
        "world_size": world_size,
        "versions": {"python": python, **package_versions(_PACKAGES)},
        **facts,
    }
    write_whole(path, sealed(start) + "\n")


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, by name."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):  # an optional backend
            versions[name] = version(name)
    return versions


def cache_folder(kind: str) -> Path:
    """Return the folder of this user's caches; raise a RuntimeError without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightrft", kind)


def write_event(folder: Path, event: str, *, step: int, details: Mapping[str, object]) -> None:
    """Append what happened to a run (started, resumed, stopped, interrupted, finished)."""
    require_held()
    entry = {"unix_seconds": time.time(), "event": event, "step": step, **details}
    path = folder / EVENTS_FILE
    with named_errors(path), path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry, ensure_ascii=False) + "\n")


def note_interruption(folder: Path) -> None:
    """Add to the events of a run that has begun and not ended that Ctrl-C ended it."""
    events = [entry.get("event") for _, entry in JsonLines(folder / EVENTS_FILE)]
    if events and events[-1] != "finished":
        step = max((step for step, _ in JsonLines(folder / METRICS_FILE)), default=0)
        write_event(folder, "interrupted", step=step, details={})


def set_aside(folder: Path, checkpoints: Path) -> Path:
    """Move the files of a run that has no checkpoint into a new folder below it.

    Args:
        folder: Folder of the run.
        checkpoints: Folder of its checkpoints: moved if it is below `folder`.

    Returns:
        The new folder.
    """
    number = 1
    while (target := folder / f"{UNFINISHED_PREFIX}{number}").exists():
        number += 1
    target.mkdir()
    # What marks the folder as used goes first: a kill in between leaves an unused folder.
    names = [*STEP_FILES, START_FILE, CONFIG_FILE, EVENTS_FILE, REPORT_FILE]
    if checkpoints.parent == folder:
        names.append(checkpoints.name)
    for name in names:
        if (folder / name).exists():
            (folder / name).rename(target / name)
    return target


@dataclass(slots=True)
class JsonLines:
    """The JSON objects of a file that is still being written or was cut off.

    Args:
        path: Path of the file; one that is missing has no lines.
        num_unreadable: Lines of the last pass that were no JSON objects with a step.
    """

    path: Path
    num_unreadable: int = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, object]]]:
        """Yield step and object of every readable line."""
        self.num_unreadable = 0
        if not self.path.is_file():
            return
        for line in lines_of(self.path):
            entry = parse_object(line)
            step = entry.get("step")
            if isinstance(step, int) and not isinstance(step, bool):
                yield step, entry
            elif line.strip():
                self.num_unreadable += 1


def drop_steps_after(path: Path, step: int) -> None:
    """Remove the lines of later steps, which a resumed run is about to write again.

    Lines that are no object with a step, such as one cut off by a kill, are removed, too.
    """
    if not path.exists():
        return
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as kept:
        for line in lines_of(path):
            line_step = parse_object(line).get("step")
            if isinstance(line_step, int) and line_step <= step:
                kept.write(line.removesuffix(b"\n") + b"\n")
    partial.replace(path)


def read_json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file; {} if it is missing or not readable."""
    try:
        return read_object(path)
    except FileError:
        return {}


@contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[None]:
    """Write what the modules log, warnings included, to `logs/rank_N.log` of the run.

    Warnings of the first rank are shown on standard error as well.
    """
    path = folder / LOG_FOLDER / f"rank_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter(_LOG_FORMAT))
    shown = logging.StreamHandler()
    shown.setLevel(logging.WARNING if rank == 0 else logging.CRITICAL)
    package_logger, warnings = logging.getLogger("lightrft"), logging.getLogger("py.warnings")
    level = package_logger.level
    package_logger.setLevel(logging.DEBUG)
    for logger, handler in ((package_logger, file), (package_logger, shown), (warnings, file)):
        logger.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    except BaseException as error:
        where = (package_logger.name, logging.INFO, __file__, 0, "the run ended here", ())
        file.handle(package_logger.makeRecord(*where, (type(error), error, error.__traceback__)))
        raise
    finally:
        logging.captureWarnings(False)
        package_logger.setLevel(level)
        for logger, handler in ((package_logger, file), (package_logger, shown), (warnings, file)):
            logger.removeHandler(handler)
        file.close()

"""Contents of the files in a run's folder, whether or not the run has ended."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from lightrft.cli.errors import UsageError
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import is_number, looks_secret, options_of
from lightrft.config.toml import format_toml, read_toml
from lightrft.reporting.files import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    START_FILE,
    SUMMARY_FILE,
    JsonLines,
    read_json,
)
from lightrft.tools.report.chain import chain_of

Status = Literal["finished", "running", "paused", "interrupted", "stopped"]
# Values beyond are drawn as gaps: no axis can show them beside others.
LARGEST = 1e30
QUIET_SECONDS = 300.0
QUIET_STEPS = 20
EVENT_WORDS = {
    "started": "started",
    "resumed": "continued after step {step}",
    "stopped": "stopped by a signal after step {step}, with a checkpoint",
    "interrupted": "interrupted (Ctrl-C) after step {step}",
    "finished": "finished after step {step}",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the run, as a TOML literal."""

    name: str
    value: str
    is_default: bool


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a run.

    Args:
        name: Name as in events.jsonl.
        when: Time in UTC; "" if it is not recorded.
        sentence: Sentence on what happened, and what the command that continued the run changed.
    """

    name: str
    when: str
    sentence: str


@dataclass(frozen=True, slots=True)
class RunData:
    """The files of a run, read.

    Args:
        name: Name of its folder.
        status: `paused` was stopped by a signal, `interrupted` by Ctrl-C; `stopped` has written
            nothing for long and has no summary.
        quiet_seconds: Seconds since something was written.
        metrics: Metrics by step, ascending; a number that is missing or not finite is None.
        options: Options of config.toml, those that differ from their default first.
        versions: Versions of packages, as recorded at the start.
        world_size: Number of processes; None where not recorded.
        seconds: Sum of the durations of all steps.
        notes: Sentences on what could not be read.
        events: Starts, stops and continuations, oldest first.
        chain: Lines of the tree of runs that it came from, see `chain_of`.
        planned_bytes: Planned memory by phase.
        hashes: Hash of the engine's weights by step.
        origins: Run that the samples in a file of rows come from, by file.
    """

    name: str
    status: Status
    quiet_seconds: float
    metrics: Mapping[int, Mapping[str, float | None]]
    options: Sequence[Option]
    versions: Mapping[str, str]
    world_size: int | None
    seconds: float
    notes: Sequence[str]
    events: Sequence[Event]
    chain: Sequence[str]
    command: str
    planned_bytes: Mapping[str, object]
    hashes: Mapping[int, int]
    origins: Mapping[str, str]

    def points(self, name: str) -> list[tuple[int, float | None]]:
        """Return steps and values of one metric, where a step has it."""
        return [(step, row[name]) for step, row in self.metrics.items() if name in row]

    def values(self, name: str) -> list[float]:
        """Return the finite values of one metric."""
        return [value for _, value in self.points(name) if value is not None]

    @property
    def last_step(self) -> int:
        """The last step with metrics; 0 without any."""
        return max(self.metrics, default=0)


# Commands of stages with another name.
_COMMANDS = {"policy": "train", "divergence": "distill"}


class NotARunError(UsageError):
    """A folder without the files that a run leaves from its first seconds on."""


def read_run(folder: Path) -> RunData:
    """Read all but the samples of a run; missing and half-written files become notes.

    Args:
        folder: Folder of the run.

    Raises:
        NotARunError: The folder holds no run.
    """
    if not any((folder / name).is_file() for name in (CONFIG_FILE, METRICS_FILE)):
        raise NotARunError(
            f"{folder} holds no run: expected the --output_dir of lightrft train, with "
            f"{CONFIG_FILE} or {METRICS_FILE}"
        )
    names = (CONFIG_FILE, METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE)
    notes = [f"{name} is missing." for name in names[:3] if not (folder / name).is_file()]
    lines = JsonLines(folder / METRICS_FILE)
    metrics, hashes = _read_metrics(lines)
    if lines.num_unreadable:
        notes.append(f"{METRICS_FILE}: {lines.num_unreadable} unreadable lines left out.")
    summary, start = read_json(folder / SUMMARY_FILE), read_json(folder / START_FILE)
    written = [(folder / name).stat().st_mtime for name in names if (folder / name).is_file()]
    quiet = max(0.0, time.time() - max(written, default=0.0))
    durations = [row["step_seconds"] or 0.0 for row in metrics.values() if "step_seconds" in row]
    last_step = max(metrics, default=0)
    world_size = start.get("world_size", summary.get("world_size"))
    planned, stage = start.get("planned_bytes"), str(start.get("stage") or "policy")
    events = [_event(step, entry) for step, entry in JsonLines(folder / EVENTS_FILE)]
    ended: dict[str, Status] = {"stopped": "paused", "interrupted": "interrupted"}
    status = ended.get(events[-1].name) if events else None
    return RunData(
        name=folder.resolve().name,
        status=status or _status(summary, last_step, quiet, durations),
        quiet_seconds=quiet,
        metrics=metrics,
        hashes=hashes,
        origins=_origins(start.get("inputs")),
        options=_read_options(folder / CONFIG_FILE, notes),
        versions=_texts(start.get("versions")) or _texts(summary.get("versions")),
        world_size=world_size if isinstance(world_size, int) else None,
        seconds=sum(durations),
        notes=notes,
        events=events,
        chain=chain_of(folder),
        command=_COMMANDS.get(stage, stage),
        planned_bytes=planned if isinstance(planned, Mapping) else {},
    )


def _status(
    summary: Mapping[str, object], last_step: int, quiet: float, durations: Sequence[float]
) -> Status:
    num_steps = summary.get("num_steps")
    if isinstance(num_steps, int) and num_steps >= last_step:
        return "finished"
    patience = max(QUIET_SECONDS, QUIET_STEPS * median(durations) if durations else 0.0)
    return "running" if quiet < patience else "stopped"


def _origins(inputs: object) -> dict[str, str]:
    entries = inputs.items() if isinstance(inputs, Mapping) else ()
    return {
        str(path): str(entry["origin"])
        for path, entry in entries
        if isinstance(entry, Mapping) and "origin" in entry
    }


def _read_metrics(lines: JsonLines) -> tuple[dict[int, dict[str, float | None]], dict[int, int]]:
    metrics: dict[int, dict[str, float | None]] = {}
    hashes: dict[int, int] = {}
    for step, entry in lines:
        row = metrics.setdefault(step, {})
        row |= {name: _number(value) for name, value in entry.items() if name != "step"}
        engine_hash = entry.get("engine_hash")
        if isinstance(engine_hash, int):  # a float has lost its last digits
            hashes[step] = engine_hash
    return dict(sorted(metrics.items())), dict(sorted(hashes.items()))


def _number(value: object) -> float | None:
    if not is_number(value):
        return None
    # An integer may be too large for a float.
    return float(value) if abs(value) <= LARGEST and math.isfinite(value) else None


def _read_options(path: Path, notes: list[str]) -> list[Option]:
    """Return the options in config.toml, or none and a note."""
    if not path.is_file():
        return []
    try:
        values = read_toml(path)
    except (ConfigError, UnicodeDecodeError) as err:
        notes.append(f"{path.name} is not readable: {err}")
        return []
    known = options_of(TrainConfig)
    options = []
    for name, value in values.items():
        if known[name][1].secret if name in known else looks_secret(name):
            continue
        default = known[name][0].default if name in known else None
        same = value == (list(default) if isinstance(default, tuple) else default)
        options.append(Option(name, _literal(value), same))
    return sorted(options, key=lambda item: item.is_default)


def _event(step: int, entry: Mapping[str, object]) -> Event:
    name = str(entry.get("event"))
    known = EVENT_WORDS.get(name)
    sentence = f"{name}, step {step}" if known is None else known.format(step=step)
    world_size = entry.get("world_size")
    if isinstance(world_size, int):
        sentence += f", {world_size} process{'' if world_size == 1 else 'es'}"
    changes = entry.get("changes")
    for change in changes if isinstance(changes, list) else []:
        if isinstance(change, Mapping):
            exact = "" if change.get("is_free") is True else ", no longer exact"
            sentence += (
                f"; {change.get('name')}: {change.get('before')} → {change.get('after')}{exact}"
            )
    return Event(name, _when(entry.get("unix_seconds")), sentence)


def _when(seconds: object) -> str:
    if not is_number(seconds):
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # no date
        return ""


def _literal(value: object) -> str:
    try:
        return format_toml(value)
    except TypeError:  # a date, which no option is
        return str(value)


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): str(text) for name, text in value.items()}

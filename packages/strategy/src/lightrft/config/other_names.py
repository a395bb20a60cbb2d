"""Options of TRL 1.16, verl 0.9 and OpenRLHF 0.11, with their names here."""

import importlib.util
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lightrft.config.files import read_text, typed
from lightrft.config.options import ConfigError, did_you_mean
from lightrft.config.toml import read_toml

# Not options of a run, but of the commands that start it.
PROCESSES = "nproc_per_node"
# For TOML files, after the name of something that is not an option.
TABLE_HINT = ": it is a table; options have none: put its lines at the top level"
# Former switches; each is now a value of an option.
SWITCHES = {"use_gspo": ("policy_loss", "gspo"), "use_cpg_loss": ("policy_loss", "cpgd")}


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of other libraries, in `other_names.toml`.

    Args:
        options: Our option by name, with its unit and other needs after a comma.
        rows: Names that stages over rows share.
        commands: Names by command, before those of all.
        unavailable: What to do instead, by name of an option that is refused.
    """

    options: Mapping[str, str]
    rows: Mapping[str, str]
    commands: Mapping[str, Mapping[str, str]]
    unavailable: Mapping[str, str]


_PATH = Path(__file__).with_name("other_names.toml")
_NAMES = typed(_Names, read_toml(_PATH), _PATH)
UNAVAILABLE = _NAMES.unavailable
OTHER_NAMES = {**_NAMES.options, **{name: ", ".join(place) for name, place in SWITCHES.items()}}
_OVER_ROWS = ("sft", "prefer", "reward")
NAMES_OF_COMMANDS = {
    command: {**(_NAMES.rows if command in _OVER_ROWS else {}), **names}
    for command, names in _NAMES.commands.items()
}


# Remedies where a command lacks an input that it cannot do without.
A_MODEL = "give a model directory, see lightrft init-model"
A_DATA_FILE = "give a JSONL, JSON, Parquet or CSV file, or the name of a data set"
A_REWARD = "give boxed_math, gsm8k or FILE.py:FUNCTION"


_ENTRY = re.compile(r"(\w+), (\w+)=\.\.\.")


def _meaning(name: str, command: str) -> str:
    """Return what a name means here: an option, with its other needs after a comma; or ""."""
    last = name.rpartition(".")[2]
    by_command = NAMES_OF_COMMANDS.get(command, {})
    return by_command.get(last) or OTHER_NAMES.get(name) or OTHER_NAMES.get(last) or ""


def same_option(name: str, command: str) -> tuple[str, str] | None:
    """Return the option that a name of another library is, with its entry ("" for all of it).

    None means that the name stands for something else here, has another unit, or is unknown.
    """
    there = _meaning(name, command)
    if (entry := _ENTRY.fullmatch(there)) is not None:
        return entry[1], entry[2]
    is_whole = "." not in name or name in OTHER_NAMES
    return (there, "") if is_whole and there.isidentifier() else None


def taken_as(name: str, option: str, entry: str) -> str:
    """Return how the line about names of other libraries shows one of them."""
    return f"{name} is {option}{entry and f' {entry}=...'}"


def without_switches(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values with former switches replaced by the values that they stand for.

    Raises:
        ConfigError: A switch contradicts the option that it is a value of.
    """
    ours = {name: value for name, value in values.items() if name not in SWITCHES}
    for name in filter(values.get, SWITCHES):
        option, value = SWITCHES[name]
        if ours.get(option) not in (None, value):
            raise ConfigError(f"{name} is {option} {value}, and {option} is {ours[option]}")
        ours[option] = value
    return ours


@cache
def said_once(text: str, *, by_workers: bool = False) -> None:
    """Print a line on the first process of a run, once.

    Args:
        text: The line.
        by_workers: Whether processes from a launcher of lightrft print it, too.
    """
    is_said = "LIGHTRFT_LAUNCHED" in os.environ and not by_workers
    if os.environ.get("RANK", "0") == "0" and not is_said:
        print(f"lightrft: {text}", file=sys.stderr, flush=True)  # noqa: T201


def with_our_names(
    values: Mapping[str, object], known: Collection[str], command: str = "train"
) -> tuple[dict[str, object], list[str]]:
    """Return values by the names of our options, and a line for each option set twice.

    Names of other libraries that mean the same are accepted; one printed line says so.

    Args:
        values: Values by name.
        known: Options that the command takes.
        command: Command that takes them.
    """
    values = without_switches(values)
    places = {name: same_option(name, command) for name in values if name not in known}
    same = {n: place for n, place in places.items() if place is not None and place[0] in known}
    ours = {name: value for name, value in values.items() if name not in same}
    problems, taken = [], []
    for name, (option, entry) in same.items():
        taken.append(taken_as(name, option, entry))
        before = ours.get(option)
        entries = before if entry and isinstance(before, Mapping) else {}
        if before is not None and (entry in entries or not entries):
            problems.append(f"{name} and {option} are one option: give one of them")
        ours[option] = {**entries, entry: values[name]} if entry else values[name]
    if taken:
        said_once(f"names of other libraries: {', '.join(taken)}")
    return ours, problems


def _is_of_transformers(name: str) -> bool:
    """Return whether transformers' TrainingArguments have this name; nothing is imported."""
    spec = importlib.util.find_spec("transformers")
    places = [] if spec is None else spec.submodule_search_locations or []
    files = [Path(place) / "training_args.py" for place in places]
    texts = [read_text(file) for file in files if file.is_file()]
    return any(re.search(rf"^    {re.escape(name)}: ", text, re.MULTILINE) for text in texts)


def option_hint(name: str, known: Collection[str], command: str = "train") -> str:
    """Return the end of a sentence about an unknown option: its name here, or the nearest known.

    Args:
        name: Name as typed; groups before a dot may clarify it.
        known: Options that could have been typed.
        command: Command that received the name.
    """
    there = _meaning(name, command) or name.rpartition(".")[2]
    first = there.split()[0].rstrip(",")
    if there != name and (first in known or first == PROCESSES):
        return f"; here it is {there}"
    if name in UNAVAILABLE:
        return f": {UNAVAILABLE[name]}"
    if there != name or _is_of_transformers(name):
        return f": nothing in lightrft {command} corresponds to it"
    flag = "--help_all" if command in NAMES_OF_COMMANDS else "--help"
    near, knows_none, _ = did_you_mean(name, known).partition("; known")
    return f"; lightrft {command} {flag} lists all" if knows_none else near

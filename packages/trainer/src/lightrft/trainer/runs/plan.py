"""Whether a run starts anew, continues, or must not start: decided from the files of its folder."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import options_of
from lightrft.config.registry import REGISTRIES, split_reference
from lightrft.config.toml import without_secrets
from lightrft.trainer.runs.files import (
    CONFIG_FILE,
    METRICS_FILE,
    START_FILE,
    SUMMARY_FILE,
    read_json,
)


@dataclass(frozen=True, slots=True)
class Change:
    """A difference between the run on disk and the command that continues it.

    Args:
        name: Of the option, or the path of an input file.
        before, after: As shown to the user.
        is_free: The continued run is as exact as an uninterrupted one.
    """

    name: str
    before: str
    after: str
    is_free: bool

    def __str__(self) -> str:
        """One line: what changed, from what, to what."""
        return f"{self.name}: {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a command does with its run folder.

    Args:
        resumes: It continues from the newest complete checkpoint, if there is one.
        changes: What differs from the run on disk.
    """

    resumes: bool
    changes: tuple[Change, ...] = ()


def plan_run(config: TrainConfig) -> RunPlan:
    """Decides from the files in the run's folder; reads only.

    An unfinished run with a complete checkpoint is continued by the same command. All else that
    would write into a used folder has to be asked for.

    Raises:
        ConfigError: The folder is used and the run cannot be continued, or a changed option would
            break its exactness.
    """
    folder = Path(config.output_dir)
    metrics = folder / METRICS_FILE
    is_used = metrics.is_file() and metrics.stat().st_size > 0
    is_known = (folder / CONFIG_FILE).is_file() and (folder / START_FILE).is_file()
    # The manifest of a checkpoint is written last.
    has_checkpoint = any((config.checkpoint_dir / "_actor").glob("*/manifest.json"))
    if not config.load_checkpoint:
        if not is_used and not has_checkpoint:
            return RunPlan(resumes=False)
        _require_continuable(config, is_known=is_known, has_checkpoint=has_checkpoint)
    changes = find_changes(folder, config) if is_known and has_checkpoint else ()
    breaking = [change for change in changes if not change.is_free]
    if breaking and not config.allow_changes:
        lines = "\n".join(f"  {change}" for change in breaking)
        raise ConfigError(
            f"{config.output_dir} cannot be continued exactly, since these changed:\n{lines}\n"
            "give their old values, another --output_dir, or --allow_changes to continue anyway"
        )
    return RunPlan(resumes=True, changes=changes)


def _require_continuable(config: TrainConfig, *, is_known: bool, has_checkpoint: bool) -> None:
    """Raises a ConfigError if the same command must not simply continue."""
    folder = config.output_dir
    if (Path(folder) / SUMMARY_FILE).is_file():
        steps = read_json(Path(folder) / SUMMARY_FILE).get("num_steps")
        raise ConfigError(
            f"--output_dir: {folder} holds another run, which is complete after {steps} steps: "
            "give a new folder, or --load_checkpoint with a larger --max_steps or --num_episodes"
        )
    if not is_known:
        where = config.checkpoint_dir if has_checkpoint else folder
        raise ConfigError(
            f"--output_dir: {where} holds another run: give a new folder, or --load_checkpoint to "
            "continue that run"
        )
    if not has_checkpoint:
        raise ConfigError(
            f"--output_dir: {folder} holds another run, which ended before its first checkpoint: "
            "give a new folder, or --load_checkpoint to start it anew there (and --save_steps)"
        )


def find_changes(folder: Path, config: TrainConfig) -> tuple[Change, ...]:
    """Options and input files that differ from those of the run in `folder`."""
    old = TrainConfig.load(folder / CONFIG_FILE)
    new = without_secrets(config)
    before = without_secrets(old)
    found = [
        Change(name, repr(before[name]), repr(new[name]), is_free=info.may_change)
        for name, (_, info) in options_of(TrainConfig).items()
        if name in new and before[name] != new[name]
    ]
    return (*found, *_changed_inputs(folder, config))


def _changed_inputs(folder: Path, config: TrainConfig) -> list[Change]:
    recorded = read_json(folder / START_FILE).get("inputs")
    if not isinstance(recorded, dict):
        return []
    changes = []
    for path in input_files(config):
        old = recorded.get(str(path))
        if not isinstance(old, dict) or old.get("modified_ns") == path.stat().st_mtime_ns:
            continue
        digest = sha256_of(path)
        if digest != old.get("sha256"):
            before = f"contents {str(old.get('sha256'))[:12]}"
            changes.append(Change(str(path), before, f"contents {digest[:12]}", is_free=False))
    return changes


def describe_inputs(config: TrainConfig) -> dict[str, Mapping[str, int | str]]:
    """Hash and time of the files that decide the numbers of a run, by path."""
    return {
        str(path): {"sha256": sha256_of(path), "modified_ns": path.stat().st_mtime_ns}
        for path in input_files(config)
    }


def input_files(config: TrainConfig) -> list[Path]:
    """Local files of prompts, and of the user's own losses, rewards and the like."""
    data = [] if config.prompt_data is None else [config.prompt_data]
    names = [name for entry in data for name in (entry, *entry.split(","))]
    for name in REGISTRIES:
        value = config.__dict__[name] or ()
        chosen = (value,) if isinstance(value, str) else value
        names += [(split_reference(item) or ("", ""))[0] for item in chosen]
    own = (config.environment, *config.tools)
    names += [(split_reference(item or "") or ("", ""))[0] for item in own]
    names += [] if config.chat_template is None else [config.chat_template]
    return [path for path in dict.fromkeys(map(Path, filter(None, names))) if path.is_file()]


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

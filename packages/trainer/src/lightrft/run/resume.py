"""Whether a run starts anew, continues, or must not start: decided from the files of its folder."""

import ast
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import options_of
from lightrft.config.registry import REGISTRIES, split_kind, split_reference
from lightrft.config.toml import without_secrets
from lightrft.reporting.files import CONFIG_FILE, START_FILE, STEP_FILES, SUMMARY_FILE, read_json
from lightrft.strategy.checkpoints.manifest import checkpoint_folders


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
    """Decision of a command about its run folder.

    Args:
        resumes: It continues from the newest whole checkpoint.
        changes: What differs from the run on disk.
        restarts: It starts anew in the folder of a run that has no checkpoint, whose files are
            kept aside.
        kept: Options that a machine decided when the run on disk started, and that the command
            leaves open.
    """

    resumes: bool
    changes: tuple[Change, ...] = ()
    restarts: bool = False
    kept: Mapping[str, object] = field(default_factory=dict)


def plan_run(config: TrainConfig) -> RunPlan:
    """Decides from the files in the run's folder; reads only.

    An unfinished run with a checkpoint is continued by the same command, one that ended before its
    first checkpoint starts over. All else that would write into a used folder has to be asked for.

    Raises:
        ConfigError: The folder is used and the run cannot be continued, or a changed option would
            break its exactness.
    """
    folder = Path(config.output_dir)
    # First: while another rank moves the files aside, an unknown run would be refused.
    is_known = (folder / CONFIG_FILE).is_file() and (folder / START_FILE).is_file()
    is_used = any(_has_content(folder / name) for name in STEP_FILES)
    has_checkpoint = shows_checkpoints(config.checkpoint_dir)
    if not config.load_checkpoint:
        if not is_used and not has_checkpoint:
            return RunPlan(resumes=False)
        _require_continuable(config, is_known=is_known, has_checkpoint=has_checkpoint)
    if not has_checkpoint:
        return RunPlan(resumes=False, restarts=is_used)
    kept = decided_before(folder, config) if is_known else {}
    changes = find_changes(folder, config.replaced(kept)) if is_known else ()
    breaking = [change for change in changes if not change.is_free]
    if breaking and not config.allow_changes:
        lines = "\n".join(f"  {change}" for change in breaking)
        raise ConfigError(
            f"{config.output_dir} cannot be continued exactly, since these changed:\n{lines}\n"
            "give their old values, another --output_dir, or --allow_changes to continue anyway"
        )
    return RunPlan(resumes=True, changes=changes, kept=kept)


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


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def shows_checkpoints(folder: Path) -> bool:
    """Whether a run's checkpoints show that one was complete once, whatever became of it.

    The critic's is written before the actor's: the first of them alone is half a checkpoint.
    """
    num_critics = len(checkpoint_folders(folder / "_critic"))
    mains = [path for path in folder.glob("_*") if path.name != "_critic"]
    return num_critics > 1 or any(checkpoint_folders(path) for path in mains)


def decided_before(folder: Path, config: TrainConfig) -> dict[str, object]:
    """Options that the run in `folder` left to its machine and that are open here."""
    old = TrainConfig.load(folder / CONFIG_FILE)
    return {
        name: old.__dict__[name]
        for name, (_, info) in options_of(TrainConfig).items()
        if info.by_machine and config.__dict__[name] is None and old.__dict__[name] is not None
    }


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
    """Local files of prompts, and of the user's own losses, rewards and what those import."""
    data = [] if config.prompt_data is None else [config.prompt_data]
    names = [name for entry in data for name in (entry, *entry.split(","))]
    chosen = [config.environment, *config.tools]
    for name in REGISTRIES:
        value = config.__dict__[name] or ()
        chosen += (value,) if isinstance(value, str) else value
    own = [Path((split_reference(split_kind(item or "")[1]) or ("", ""))[0]) for item in chosen]
    names += [str(file) for path in own if path.is_file() for file in (path, *files_beside(path))]
    names += [path for path in (config.chat_template, config.judge_template) if path is not None]
    return [path for path in dict.fromkeys(map(Path, filter(None, names))) if path.is_file()]


def files_beside(plugin: Path) -> list[Path]:
    """Files of its folder that a plug-in imports, and what those import from there in turn."""
    found: list[Path] = []
    remaining = [plugin]
    while remaining:
        path = remaining.pop()
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # refused where it is loaded
        for module in _imported(tree, path, plugin.parent):
            for file in (module.with_suffix(".py"), module / "__init__.py"):
                if file.is_file() and file not in (plugin, *found):
                    found.append(file)
                    remaining.append(file)
    return found


def _imported(tree: ast.Module, path: Path, folder: Path) -> Iterator[Path]:
    """Paths that imports lead to, if below `folder`; relative ones are of `path`."""
    for node in ast.walk(tree):
        names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
        start = folder
        if isinstance(node, ast.ImportFrom):
            above = path.absolute().parents
            start = above[min(node.level, len(above)) - 1] if node.level else folder
            names = [node.module or "", *(f"{node.module or ''}.{name}" for name in names)]
        for name in names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            parts = [part for part in name.split(".") if part.isidentifier()]
            # `import a.b` runs a, too.
            yield from (start.joinpath(*parts[:count]) for count in range(1, len(parts) + 1))


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

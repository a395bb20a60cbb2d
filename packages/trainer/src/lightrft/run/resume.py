"""Start, continuation or refusal of a run: decided from the inputs and the files of its folder."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lightrft.config import ConfigError, RunControlOptions, TrainConfig
from lightrft.config.files import (
    CHECKSUM,
    FileError,
    file_sha256,
    read_object,
    regular_file,
    sealed,
    typed,
    unsealed,
)
from lightrft.config.options import options_of
from lightrft.config.parts.data import split_sources
from lightrft.config.registry import REGISTRIES, split_kind, split_reference
from lightrft.config.toml import without_secrets, write_whole
from lightrft.datasets.files import local_files
from lightrft.datasets.row_origin import origin_of
from lightrft.engines.media.files import SETTLED_SECONDS, FileFacts, FileFactsByPath, keeping
from lightrft.reporting.files import (
    CONFIG_FILE,
    START_FILE,
    STEP_FILES,
    SUMMARY_FILE,
    cache_folder,
    package_versions,
    read_json,
)
from lightrft.reporting.metric_table import larger_is_better
from lightrft.run.provenance import describe_models, named_paths, own_functions
from lightrft.strategy.checkpoints.manifest import checkpoint_folders


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Decision of a command about its run folder.

    Args:
        resumes: It continues from the newest whole checkpoint.
        changes: Differences from the run on disk.
        restarts: It starts anew in the folder of a run that has no checkpoint, whose files are
            moved aside.
        kept: Options that a machine decided when the run on disk started, and that the command
            leaves open.
        summary: Summary if this very command has completed its run; {} if work is left.
        warnings: Damage of the files that record how the run started; a line each.
        seen: Traces of runs in the folder when the plan was made.
    """

    resumes: bool
    changes: tuple[Change, ...] = ()
    restarts: bool = False
    kept: Mapping[str, object] = field(default_factory=dict)
    summary: Mapping[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seen: object = None


def plan_run(config: TrainConfig, stage: str = "") -> RunPlan:
    """Decide from the files in the run's folder; read only.

    The same command continues an unfinished run with a checkpoint, starts over one that ended
    before its first checkpoint, and leaves a complete one as it is. Everything else that would
    write into a used folder needs an explicit option.

    Args:
        config: Options of the command.
        stage: Stage that it trains; "" is any.

    Raises:
        ConfigError: The folder is of a run of another stage, or it is used and the run cannot be
            continued, or a changed option would break its exactness; or `best_metric` cannot be
            ranked.
    """
    if config.best_metric is not None:
        larger_is_better(config.best_metric)
    folder, seen = Path(config.output_dir), _traces(config)
    # First: while another rank moves the files aside, an unknown run would be refused.
    is_known = (folder / CONFIG_FILE).is_file() and (folder / START_FILE).is_file()
    is_used = any(_has_content(folder / name) for name in STEP_FILES)
    has_checkpoint = shows_checkpoints(config.checkpoint_dir)
    if (is_used or has_checkpoint) and is_known:
        _require_stage(folder, stage)
    if not config.load_checkpoint:
        if not is_used and not has_checkpoint:
            return RunPlan(resumes=False, seen=seen)
        if not is_known:
            where = config.checkpoint_dir if has_checkpoint else folder
            raise ConfigError(
                f"--output_dir: {where} holds another run: give a new folder, or "
                "--load_checkpoint to continue that run"
            )
        # Damaged files are written again, after the last checkpoint.
        summary = read_json(folder / SUMMARY_FILE)
        if summary:
            _require_same(config, summary)
            return RunPlan(resumes=False, summary=summary, seen=seen)
    if not has_checkpoint:
        return RunPlan(resumes=False, restarts=is_used, seen=seen)
    plan = _continued(folder, config) if is_known else RunPlan(resumes=True)
    return replace(plan, seen=seen)


def require_unchanged(config: RunControlOptions, plan: RunPlan) -> None:
    """Raise a ConfigError if a run began, saved or ended in the folder after the plan."""
    if _traces(config) != plan.seen:
        raise ConfigError(
            f"--output_dir: {config.output_dir} changed since it was checked: run the command again"
        )


def _traces(config: RunControlOptions) -> object:
    folder = Path(config.output_dir)
    records = [read_json(folder / name) for name in (START_FILE, SUMMARY_FILE)]
    steps = [_has_content(folder / name) for name in STEP_FILES]
    return records, steps, sorted(config.checkpoint_dir.glob("_*/global_step*"))


def _continued(folder: Path, config: TrainConfig) -> RunPlan:
    """Return the plan of a continued run; raise a ConfigError if a change breaks its exactness."""
    warnings, kept = damage_of_records(folder), decided_before(folder, config)
    changes = find_changes(folder, config.replaced(kept))
    breaking = [change for change in changes if not change.is_free]
    if breaking and not config.allow_changes:
        if any(change.name == "fsdp" for change in breaking) and config.lacks_deepspeed:
            raise ConfigError(
                f"{config.output_dir} was begun with DeepSpeed, which is not installed: install "
                "lightrft[deepspeed], or give another --output_dir"
            )
        lines = "\n".join(f"  {line}" for line in (*breaking, *warnings))
        raise ConfigError(
            f"{config.output_dir} cannot be continued exactly, since these changed:\n{lines}\n"
            "give their old values, another --output_dir, or --allow_changes to continue anyway"
        )
    return RunPlan(resumes=True, changes=changes, kept=kept, warnings=warnings)


def require_media(config: RunControlOptions, media: str) -> None:
    """Raise a ConfigError if the rows of a continued run have other media than at its start."""
    changes = changed_media(_read_start(Path(config.output_dir)), media)
    if changes and not config.allow_changes:
        raise ConfigError(
            f"{config.output_dir} cannot be continued exactly, since this changed: {changes[0]}; "
            "bring back the files, give another --output_dir, or --allow_changes"
        )


def damage_of_records(folder: Path) -> tuple[str, ...]:
    """Return a line for the file beside the checkpoints that differs from what the run wrote."""
    start = _read_start(folder)
    if not start:
        return (f"{folder / START_FILE} is damaged: which input files changed is not known",)
    if start.get("config_sha256") not in (None, "", file_sha256(folder / CONFIG_FILE)):
        return (f"{folder / CONFIG_FILE} is not as the run wrote it",)
    return ()


def _read_start(folder: Path) -> dict[str, object]:
    """Return the record of the start of the run in `folder`; {} if it does not fit its hash."""
    start = read_json(folder / START_FILE)
    if start.keys().isdisjoint({CHECKSUM, "config_sha256"}):
        return start  # from a version that wrote no hashes
    try:
        return unsealed(start, START_FILE)
    except FileError:
        return {}


def _options_before(folder: Path) -> TrainConfig:
    """Return the options of the run in `folder`.

    Raises:
        ConfigError: They cannot be read; the message says how to go on without them.
    """
    try:
        return TrainConfig.load(folder / CONFIG_FILE)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nremove {folder / CONFIG_FILE} and give --load_checkpoint to continue with "
            "the options of this command"
        ) from error


def _require_same(config: TrainConfig, summary: Mapping[str, object]) -> None:
    """Raise a ConfigError unless the run of the summary is complete, and has the same options."""
    folder, how = config.output_dir, f"complete after {summary.get('num_steps')} steps"
    same = config.replaced(decided_before(Path(folder), config))
    odd = [str(change) for change in find_changes(Path(folder), same)]
    odd += damage_of_records(Path(folder))
    if alarms := summary.get("alarms"):
        how, odd = how.replace("complete", "ended by an alarm"), [str(alarms), *odd]
    if odd:
        lines = "\n".join(f"  {line}" for line in odd)
        raise ConfigError(
            f"--output_dir: {folder} holds another run, which is {how}:\n{lines}\n"
            "give a new folder, or --load_checkpoint with a larger --max_steps or --num_episodes "
            "(on rows --max_epochs)"
        )


def stage_of(folder: Path) -> str:
    """Return the stage that the run in `folder` trains; "" if no file says so."""
    return str(_read_start(folder).get("stage") or "")


def _require_stage(folder: Path, stage: str) -> None:
    """Raise a ConfigError if the run in `folder` says that it is of another stage."""
    recorded = stage_of(folder)
    if stage and recorded and recorded != stage:
        raise ConfigError(
            f"--output_dir: {folder} holds a run of the stage {recorded}, and this command trains "
            f"{stage}: give a new folder"
        )


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def shows_checkpoints(folder: Path) -> bool:
    """Return whether a checkpoint was complete once, even if it is gone or damaged.

    The critic's is written before the actor's: the first of them alone is half a checkpoint.
    """
    num_critics = len(checkpoint_folders(folder / "_critic"))
    mains = [path for path in folder.glob("_*") if path.name != "_critic"]
    return num_critics > 1 or any(checkpoint_folders(path) for path in mains)


def decided_before(folder: Path, config: TrainConfig) -> dict[str, object]:
    """Return options that the start of the run in `folder` decided, and that are unchanged here.

    An option that was left to the machine is one of them: it was None, and is None here.
    """
    old, now = _options_before(folder), as_json(without_secrets(config))
    before = {name: None for name, (_, info) in options_of(TrainConfig).items() if info.by_machine}
    recorded = _read_start(folder).get("decided")
    before |= recorded if isinstance(recorded, dict) else {}
    return {
        name: old.__dict__[name]
        for name, value in before.items()
        if name in now and now[name] == value and old.__dict__[name] != config.__dict__[name]
    }


def decided_options(given: TrainConfig, config: TrainConfig) -> dict[str, object]:
    """Return options of the command that a start decided differently."""
    before, after = as_json(without_secrets(given)), as_json(without_secrets(config))
    if config.fsdp and config.lacks_deepspeed:
        before["fsdp"] = False  # Left out, it is the same command here, and where DeepSpeed is.
    return {name: value for name, value in before.items() if after.get(name) != value}


def as_json(values: Mapping[str, object]) -> dict[str, object]:
    """Return options as a JSON file holds them."""
    plain: dict[str, object] = json.loads(json.dumps(values, default=str))
    return plain


def find_changes(folder: Path, config: TrainConfig) -> tuple[Change, ...]:
    """Return options, input files and models that differ from those of the run in `folder`."""
    old = _options_before(folder)
    new = without_secrets(config)
    before = without_secrets(old)
    new["ckpt_path"], before["ckpt_path"] = str(config.checkpoint_dir), str(old.checkpoint_dir)
    start = _read_start(folder)
    # Passes over rows make a run longer; those over the samples of a step make it another.
    longer = "max_epochs" if start.get("stage", "policy") != "policy" else ""
    changes = [
        Change(name, repr(before[name]), repr(new[name]), info.may_change or name == longer)
        for name, (_, info) in options_of(TrainConfig).items()
        if name in new and before[name] != new[name]
    ]
    return (*changes, *changed_inputs(start, config), *changed_models(start, config))


# Name of the images, videos and sounds of rows, beside the paths of files.
MEDIA = "media of prompt_data"


@dataclass(frozen=True, slots=True)
class Change:
    """A difference between the run on disk and the command that continues it.

    Args:
        name: Name of the option, or path of an input file.
        before, after: Values as the user sees them.
        is_free: Whether the continued run is as exact as an uninterrupted one.
    """

    name: str
    before: str
    after: str
    is_free: bool

    def __str__(self) -> str:
        """Return one line: the change, its old and new value."""
        return f"{self.name}: {self.before} -> {self.after}"


def media_sha256(digests: Iterable[bytes]) -> str:
    """Return one hash of all media of a run's rows, in order; "" without media."""
    joined = b"\n".join(digests)
    return hashlib.sha256(joined).hexdigest() if joined else ""


@contextmanager
def remembered_media(
    config: TrainConfig, *, writes: bool, settled_seconds: float = SETTLED_SECONDS
) -> Iterator[None]:
    """Reuse an earlier run's facts about media files of the same data, instead of reading them.

    A file of `$XDG_CACHE_HOME/lightrft/media` (`~/.cache`) holds them. It is read at the beginning
    and written at the end, also after an error; if that fails nothing is remembered.

    Args:
        config: Options that name the data.
        writes: Whether this rank writes the file; one does.
        settled_seconds: See `FileFactsByPath`.
    """
    versions = package_versions(("lightrft-engines", "pillow"))
    data = [config.prompt_data, config.eval_data, config.pretrain_data]
    name = hashlib.sha256(json.dumps([str(Path.cwd()), data, versions]).encode()).hexdigest()
    known: dict[str, FileFacts] = {}
    with suppress(RuntimeError, OSError, FileError):
        held = unsealed(read_object(cache_folder("media") / name), name)
        known = typed(dict[str, FileFacts], held["files"], name)
    facts, before = FileFactsByPath(known, settled_seconds=settled_seconds), repr(known)
    try:
        with keeping(facts):
            yield
    finally:
        if writes and repr(facts.by_path) != before:
            files = {path: asdict(each) for path, each in facts.by_path.items()}
            with suppress(RuntimeError, OSError):
                folder = cache_folder("media")
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / name, sealed({"files": files}))


def describe_inputs(config: TrainConfig, media: str = "") -> dict[str, Mapping[str, object]]:
    """Return hash and time of the files that decide a run's numbers, by path; hashes of functions.

    For rows that were made of another run's samples, `origin` and `run` name that run.

    Args:
        config: Options that name the files.
        media: Hash of the media of the rows, for the entry `MEDIA`; "" without.
    """
    inputs: dict[str, Mapping[str, object]] = {}
    for path in input_files(config):
        digest = file_sha256(path)
        facts = {"sha256": digest, "modified_ns": path.stat().st_mtime_ns}
        inputs[str(path)] = {**facts, **origin_of(path, digest)}
    hashes = own_functions(config) | ({MEDIA: media} if media else {})
    return inputs | {name: {"sha256": digest} for name, digest in hashes.items()}


def changed_media(start: Mapping[str, object], media: str) -> list[Change]:
    """Return the change of media, if rows have others than at the start of the run."""
    recorded = start.get("inputs")
    old = recorded.get(MEDIA) if isinstance(recorded, Mapping) else None
    return _difference(MEDIA, "contents", old.get("sha256"), media) if isinstance(old, dict) else []


def changed_inputs(start: Mapping[str, object], config: TrainConfig) -> list[Change]:
    """Return files and functions whose contents changed since a run started.

    Args:
        start: Record of the start.
        config: Options of the command that continues it.
    """
    recorded = start.get("inputs")
    if not isinstance(recorded, Mapping):
        return []
    changes = []
    deciding = input_files(config, held_out=False)
    for path in input_files(config):
        old = recorded.get(str(path))
        if not isinstance(old, Mapping) or old.get("modified_ns") == path.stat().st_mtime_ns:
            continue
        # Held-out rows may change, as the option that names them may.
        differences = _difference(str(path), "contents", old.get("sha256"), file_sha256(path))
        changes += [replace(each, is_free=path not in deciding) for each in differences]
    for name, digest in own_functions(config).items():
        old = recorded.get(name)
        if isinstance(old, Mapping):
            changes += _difference(name, "code", old.get("sha256"), digest)
    return changes


def changed_models(start: Mapping[str, object], config: TrainConfig) -> list[Change]:
    """Return models whose weights or tokenizers changed since the start; see `changed_inputs`.

    This includes the trained model: it is the reference, and readers of the run's record look for
    its weights there.
    """
    recorded = start.get("models")
    known = recorded if isinstance(recorded, Mapping) else {}
    changes = []
    for role, entry in describe_models(config, known).items():
        old = known.get(role)
        # Another place counts as a changed option.
        if isinstance(old, Mapping) and old.get("path") == entry["path"]:
            name = f"{role} {entry['path']}"
            for what in ("weights", "tokenizer"):
                key = f"{what}_sha256"
                if what == "weights" or key in old:  # older versions recorded no tokenizer
                    changes += _difference(
                        name, what, old.get(key) or "", str(entry.get(key) or "")
                    )
    return changes


def _difference(name: str, what: str, before: object, after: str) -> list[Change]:
    if before == after:
        return []
    old, new = (f"{what} {str(digest)[:12] or 'none'}" for digest in (before, after))
    return [Change(name, old, new, is_free=False)]


def input_files(config: TrainConfig, *, held_out: bool = True) -> list[Path]:
    """Return local files of data, templates and stored numbers, user code, and its imports.

    Args:
        config: Options that name them.
        held_out: Whether to include the rows of evaluations.
    """
    names: list[str | Path] = []
    sources = (
        (config.prompt_data, config.prompt_split),
        (config.eval_data if held_out else None, config.eval_split),
        (config.pretrain_data, "train"),
    )
    for text, split in sources:
        for source in split_sources(text) if text is not None else ():
            names += local_files(source, split)
    chosen = [config.environment, config.agent, *config.tools]
    for name in REGISTRIES:
        value = config.__dict__[name] or ()
        chosen += (value,) if isinstance(value, str) else value
    code_files = [
        Path((split_reference(split_kind(item or "")[1]) or ("", ""))[0]) for item in chosen
    ]
    names += [file for path in code_files if path.is_file() for file in (path, *files_beside(path))]
    names += named_paths(config.agent_command or "")
    names += filter(
        None,
        (config.ref_logprobs, config.chat_template, config.judge_template, config.judge_rubric),
    )
    return [path for path in dict.fromkeys(map(Path, names)) if path.is_file()]


def files_beside(plugin: Path) -> list[Path]:
    """Return files of its folder that a plug-in imports, directly or indirectly."""
    files: list[Path] = []
    remaining = [plugin]
    while remaining:
        path = remaining.pop()
        try:
            tree = ast.parse(regular_file(path).read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # loading it raises the error
        for module in _imported(tree, path, plugin.parent):
            for file in (module.with_suffix(".py"), module / "__init__.py"):
                if file.is_file() and file not in (plugin, *files):
                    files.append(file)
                    remaining.append(file)
    return files


def _imported(tree: ast.Module, path: Path, folder: Path) -> Iterator[Path]:
    """Yield paths that imports lead to, if below `folder`; relative ones start at `path`."""
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

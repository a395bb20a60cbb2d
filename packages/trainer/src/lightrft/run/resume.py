"""Start, continuation or refusal of a run: decided from the files of its folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightrft.config import ConfigError, RunControlOptions, TrainConfig
from lightrft.config.files import CHECKSUM, FileError, file_sha256, unsealed
from lightrft.config.options import options_of
from lightrft.config.toml import without_secrets
from lightrft.reporting.files import CONFIG_FILE, START_FILE, STEP_FILES, SUMMARY_FILE, read_json
from lightrft.reporting.metric_table import larger_is_better
from lightrft.run.run_inputs import Change, changed_inputs, changed_media, changed_models
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
            "give a new folder, or --load_checkpoint with a larger --max_steps or --num_episodes"
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
    changes = [
        Change(name, repr(before[name]), repr(new[name]), is_free=info.may_change)
        for name, (_, info) in options_of(TrainConfig).items()
        if name in new and before[name] != new[name]
    ]
    start = _read_start(folder)
    return (*changes, *changed_inputs(start, config), *changed_models(start, config))

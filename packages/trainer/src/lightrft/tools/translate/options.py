"""A script of TRL's GRPO as the folder of a run, where both can do it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightrft.cli.errors import UsageError
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.other_names import OTHER_NAMES
from lightrft.config.toml import format_toml
from lightrft.tools.translate.script import Script, read_script

OPTIONS_FILE, REWARD_FILE, ROWS_FILE = "run.toml", "rewards.py", "rows.jsonl"

# What a script leaves out has TRL's value, not ours (GRPOConfig of TRL 1.16).
DEFAULTS: dict[str, object] = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "num_train_epochs": 3,
    "max_completion_length": 512,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "beta": 0.0,
    "bf16": True,
}
_LOSSES = {
    "grpo": {"loss_agg_mode": "seq-mean-token-mean"},
    "dr_grpo": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    "dapo": {"loss_agg_mode": "token-mean"},
    "bnpo": {"loss_agg_mode": "token-mean"},
    "cispo": {"policy_loss": "cispo", "loss_agg_mode": "token-mean"},
    "sapo": {"policy_loss": "sapo"},
}
_SCALES = {"group": "group_norm", "batch": "group_mean_batch_std", "none": "dr_grpo"}
_SCHEDULES: dict[str, Mapping[str, object]] = {
    "linear": {"lr_scheduler": "linear"},
    "constant": {"lr_scheduler": "constant"},
    "constant_with_warmup": {"lr_scheduler": "constant"},
    "cosine": {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.0},
}
# Sizes, which are counted in other units here.
_SIZES = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "steps_per_generation": None,
    "generation_batch_size": None,
}
# They change nothing that is trained.
_WITHOUT_EFFECT = (
    "push_to_hub",
    "remove_unused_columns",
    "log_completions",
    "logging_dir",
    "disable_tqdm",
    "use_cpu",
)


@dataclass(slots=True)
class Translation:
    """Options, and what a person has to look at.

    Args:
        options: By our names.
        notes: A line each.
    """

    options: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def translate(arguments: Mapping[str, object], processes: int = 1) -> Translation:
    """The options of a run of TRL.

    Args:
        arguments: Of GRPOConfig and GRPOTrainer.
        processes: Of the run; sizes that TRL counts by process are of all here.

    Raises:
        UsageError: A size is no positive integer.
    """
    found = Translation()
    values = {**DEFAULTS, **arguments}
    sizes = {name: values.pop(name, default) for name, default in _SIZES.items()}
    updates = _sizes(sizes, processes, found)
    iterations = _size({"num_iterations": 1, **values}, "num_iterations") or 1
    _steps(values, updates * iterations, found)
    betas = (values.pop("adam_beta1"), values.pop("adam_beta2"))
    found.options["adam_betas"] = betas
    for name, value in values.items():
        if name in _SPECIAL:
            _SPECIAL[name](value, found)
        elif name not in _WITHOUT_EFFECT:
            _named(name, value, found)
    return found


def _size(sizes: Mapping[str, object], name: str) -> int | None:
    """A size of TRL, or None where it follows from others.

    Raises:
        UsageError: It is no positive integer.
    """
    value = sizes[name]
    if value is not None and (type(value) is not int or value < 1):
        raise UsageError(f"{name}: got {value!r}, expected an integer from 1")
    return value


def _sizes(sizes: Mapping[str, object], processes: int, found: Translation) -> int:
    """Notes sizes of batches; the optimizer steps on a rollout are the result."""
    given = {name: _size(sizes, name) for name in sizes}
    rows = given["per_device_train_batch_size"] or 1
    group = given["num_generations"] or 1
    update = rows * (given["gradient_accumulation_steps"] or 1) * processes
    steps = given["steps_per_generation"]
    total = given["generation_batch_size"] or (rows * steps * processes if steps else update)
    if total % group or total % update:
        found.notes.append(
            f"{total} samples a step are no whole number of groups of {group} or of updates of "
            f"{update}: choose rollout_batch_size and train_batch_size"
        )
    found.options |= {
        "n_samples_per_prompt": group,
        "rollout_batch_size": max(1, total // group),
        "train_batch_size": min(update, total),
        "micro_train_batch_size": rows,
    }
    return max(1, total // update)


def _steps(values: dict[str, object], updates: int, found: Translation) -> None:
    """Counts in steps of a rollout, not in optimizer steps; each has so many of those.

    With `max_steps` TRL passes over the rows until then, however often.
    """
    for name, value in list(values.items()):
        if not name.endswith("_steps") or name not in TrainConfig.__dataclass_fields__:
            continue
        if isinstance(value, int) and value > 0:
            values[name] = -(-value // updates)
        elif isinstance(value, float):
            found.notes.append(f"{name} = {value!r}: here it is a number of steps, not a share")
            del values[name]
    steps = values.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        values["num_train_epochs"] = steps
    else:
        values.pop("max_steps", None)


def _named(name: str, value: object, found: Translation) -> None:
    """An option of one name there and here, or a note."""
    there = OTHER_NAMES.get(name, name)
    if value is None:
        return
    if there in TrainConfig.__dataclass_fields__:
        found.options[there] = value
    elif name in OTHER_NAMES:
        found.notes.append(f"{name} = {value!r}: here it is {there}")
    else:
        found.notes.append(f"{name} = {value!r}: nothing here has this name")


def _beta(value: object, found: Translation) -> None:
    if value:
        found.options |= {"init_kl_coef": value, "use_kl_loss": True, "kl_estimator": "k3"}


def _choice(name: str, ways: Mapping[str, Mapping[str, object]]) -> Callable[..., None]:
    def choose(value: object, found: Translation) -> None:
        if str(value) in ways:
            found.options |= ways[str(value)]
        else:
            found.notes.append(f"{name} = {value!r}: expected one of {', '.join(ways)}")

    return choose


def _scale(value: object, found: Translation) -> None:
    name = {"True": "group", "False": "none"}.get(str(value), str(value))
    ways: dict[str, Mapping[str, object]] = {
        each: {"advantage_estimator": ours} for each, ours in _SCALES.items()
    }
    _choice("scale_rewards", ways)(name, found)


def _level(value: object, found: Translation) -> None:
    ways: dict[str, Mapping[str, object]] = {"token": {}, "sequence": {"policy_loss": "gspo"}}
    _choice("importance_sampling_level", ways)(value, found)


def _model(value: object, found: Translation) -> None:
    found.options["pretrain"] = value


def _trackers(value: object, found: Translation) -> None:
    if value not in ("none", None, []):
        _named("report_to", value, found)


def _engine(value: object, found: Translation) -> None:
    if value:
        found.options["engine_type"] = "vllm"


def _optimizer(value: object, found: Translation) -> None:
    """8-bit Adam, and AdamW, which is what there is."""
    if "adam" in str(value) and "8bit" in str(value):
        found.options |= {"adam_8bit": True, "fsdp": True}
    elif not str(value).startswith("adamw_torch"):
        found.notes.append(f"optim: {value!r} has no counterpart, AdamW is taken")


_SPECIAL: dict[str, Callable[[object, Translation], None]] = {
    "beta": _beta,
    "loss_type": _choice("loss_type", _LOSSES),
    "lr_scheduler_type": _choice("lr_scheduler_type", _SCHEDULES),
    "scale_rewards": _scale,
    "importance_sampling_level": _level,
    "model": _model,
    "optim": _optimizer,
    "report_to": _trackers,
    "use_vllm": _engine,
    "warmup_ratio": lambda value, found: _named("lr_warmup_ratio", value, found),
}


def translate_script(path: Path, folder: Path, processes: int = 1) -> str:
    """Writes options, rewards and rows of a script, and says what a person has to look at.

    Args:
        path: Of the script, which is read and not run.
        folder: A new one, or one without files of these names.
        processes: Of the run.

    Raises:
        UsageError: No such script, or files in the folder that would be lost.
        ConfigError: The script's options contradict each other.
    """
    script = read_script(path)
    found = translate(script.arguments, processes)
    found.notes += [f"{name}: cannot be read from {text!r}" for name, text in script.unread.items()]
    files = _files(script, folder)
    options = found.options | _places(script, folder)
    lacking = [name for name in ("pretrain", "prompt_data") if name not in options]
    found.notes += [f"{name} is missing: add it to {OPTIONS_FILE}" for name in lacking]
    try:
        config = TrainConfig(**options)  # type: ignore[arg-type]
    except ConfigError as err:
        raise ConfigError(f"{path}: {err}") from err
    values = {name: config.__dict__[name] for name in options}
    lines = [f"{name} = {format_toml(value)}" for name, value in values.items()]
    notes = [f"# look: {note}" for note in found.notes]
    files[OPTIONS_FILE] = "\n".join([*notes, *lines]) + "\n"
    kept = [name for name in files if (folder / name).exists()]
    if kept:
        raise UsageError(f"{folder} has {', '.join(kept)}: give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    command = f"lightrft train --config {folder / OPTIONS_FILE}"
    return "\n".join([f"wrote {', '.join(files)} to {folder}", *found.notes, f"next: {command}"])


def _files(script: Script, folder: Path) -> dict[str, str]:
    files = {}
    if script.rewards:
        files[REWARD_FILE] = script.reward_source
    if script.rows:
        files[ROWS_FILE] = "".join(json.dumps(row) + "\n" for row in script.rows)
    return files


def _places(script: Script, folder: Path) -> dict[str, object]:
    """Options that name the files, and columns as TRL calls them."""
    found: dict[str, object] = {"input_key": "prompt"}
    if script.rewards:
        found["reward_fn"] = tuple(f"{folder / REWARD_FILE}:{name}" for name in script.rewards)
    if script.rows:
        found["prompt_data"] = str(folder / ROWS_FILE)
        found["apply_chat_template"] = isinstance(script.rows[0].get("prompt"), list)
    return found

"""A script of TRL, translated into the folder of a run, as far as both can do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightrft.cli.errors import UsageError
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.files import typed
from lightrft.config.other_names import option_hint, same_option
from lightrft.config.registry import LOGGERS
from lightrft.config.toml import format_toml, read_toml
from lightrft.datasets.files import Row, local_files, scan_rows
from lightrft.tools.translate.script import Script, read_script

OPTIONS_FILE, REWARD_FILE = "run.toml", "rewards.py"

# Sizes, which are counted in other units here.
_ROW_SIZES: dict[str, int | None] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
}
_SIZES = {
    **_ROW_SIZES,
    "num_generations": 8,
    "steps_per_generation": None,
    "generation_batch_size": None,
}
Values = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Table:
    """Options of TRL by name, in `trl.toml`; those of "all" belong to every trainer or command.

    Args:
        without_effect: Options that change nothing that is trained.
        defaults: Values by trainer for options that a script leaves out: TRL's defaults, not ours.
        values: Our options of the same meaning, by command, option and value.
    """

    without_effect: tuple[str, ...]
    defaults: Mapping[str, Values]
    values: Mapping[str, Mapping[str, Mapping[str, Values]]]


def options_of_trl() -> Table:
    """Return the options of TRL."""
    path = Path(__file__).with_name("trl.toml")
    return typed(Table, read_toml(path), path)


@dataclass(slots=True)
class Translation:
    """Options, and notes for a person to check.

    Args:
        command: Command that takes the options.
        loss: Trainer of TRL: grpo, sft, dpo, kto, reward.
        options: Values by our names.
        notes: Lines about what has no counterpart.
    """

    command: str
    loss: str
    options: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def translate(
    arguments: Mapping[str, object], processes: int = 1, script: Script | None = None
) -> Translation:
    """Return the options of a run of TRL.

    Args:
        arguments: Values of a trainer, its configuration and its LoraConfig by name.
        processes: Processes of the run; sizes that TRL counts per process are totals here.
        script: Script of the arguments; None is one of GRPOTrainer.

    Raises:
        UsageError: A size is no positive integer.
    """
    made = Translation(*(("train", "grpo") if script is None else (script.command, script.loss)))
    table = options_of_trl()
    values = {**table.defaults["all"], **table.defaults[made.loss], **arguments}
    samples = made.command == "train"
    names = _SIZES if samples else _ROW_SIZES
    sizes = {name: values.pop(name, default) for name, default in names.items()}
    updates = 1
    if samples:
        updates = _sizes(sizes, processes, made)
        updates *= _size({"num_iterations": 1, **values}, "num_iterations") or 1
    else:
        rows = _size(sizes, "per_device_train_batch_size") or 1
        update = rows * (_size(sizes, "gradient_accumulation_steps") or 1) * processes
        made.options |= {"train_batch_size": update, "micro_train_batch_size": rows}
    _warm_up(values)
    _steps(values, updates, made)
    betas = (values.pop("adam_beta1"), values.pop("adam_beta2"))
    made.options["adam_betas"] = betas
    special = {**_SPECIAL, **_SPECIAL_OF.get(made.command, {})}
    choices = {**table.values["all"], **table.values.get(made.command, {})}
    for name, value in values.items():
        ways = choices.get(name, {})
        if name in special:
            special[name](value, made)
        elif str(value) in ways:
            made.options |= ways[str(value)]
        elif len(ways) > 1 and name not in TrainConfig.__dataclass_fields__:
            made.notes.append(f"{name} = {value!r}: expected one of {', '.join(ways)}")
        elif name not in table.without_effect:
            _named(name, value, made)
    return made


def _size(sizes: Mapping[str, object], name: str) -> int | None:
    """Return a size of TRL, or None where it follows from others.

    Raises:
        UsageError: The size is no positive integer.
    """
    value = sizes[name]
    if value is not None and (type(value) is not int or value < 1):
        raise UsageError(f"{name}: got {value!r}, expected an integer from 1")
    return value


def _sizes(sizes: Mapping[str, object], processes: int, made: Translation) -> int:
    """Note sizes of batches; return the optimizer steps on a rollout."""
    sizes_by_name = {name: _size(sizes, name) for name in sizes}
    rows = sizes_by_name["per_device_train_batch_size"] or 1
    group = sizes_by_name["num_generations"] or 1
    update = rows * (sizes_by_name["gradient_accumulation_steps"] or 1) * processes
    steps = sizes_by_name["steps_per_generation"]
    total = sizes_by_name["generation_batch_size"] or (
        rows * steps * processes if steps else update
    )
    if total % group or total % update:
        made.notes.append(
            f"{total} samples a step are no whole number of groups of {group} or of updates of "
            f"{update}: choose rollout_batch_size and train_batch_size"
        )
    made.options |= {
        "n_samples_per_prompt": group,
        "rollout_batch_size": max(1, total // group),
        "train_batch_size": min(update, total),
        "micro_train_batch_size": rows,
    }
    return max(1, total // update)


def _steps(values: dict[str, object], updates: int, made: Translation) -> None:
    """Convert optimizer steps into steps of a rollout, which have `updates` of them each.

    With `max_steps`, TRL passes over the rows until then, however often.
    """
    for name, value in list(values.items()):
        if not name.endswith("_steps") or name not in TrainConfig.__dataclass_fields__:
            continue
        if isinstance(value, int) and value > 0:
            values[name] = -(-value // updates)
        elif isinstance(value, float):
            made.notes.append(f"{name} = {value!r}: here it is a number of steps, not a share")
            del values[name]
    steps = values.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        values["num_train_epochs"] = steps
    else:
        values.pop("max_steps", None)


def _warm_up(values: dict[str, object]) -> None:
    """Turn steps of warm-up into a share of all steps, where their number is known."""
    steps, total = values.get("warmup_steps"), values.get("max_steps")
    if isinstance(steps, float) and steps < 1:
        values["warmup_ratio"] = values.pop("warmup_steps")
    elif isinstance(steps, int) and isinstance(total, int) and total > 0:
        values["warmup_ratio"] = round(steps / total, 6)
        del values["warmup_steps"]


def _named(name: str, value: object, made: Translation) -> None:
    """Note an option with the same meaning here, or a line that says it has none."""
    if value is None:
        return
    option, entry = same_option(name, made.command) or (name, "")
    if entry:
        entries = made.options.get(option)
        made.options[option] = {**(entries if isinstance(entries, dict) else {}), entry: value}
    elif option in TrainConfig.__dataclass_fields__:
        made.options[option] = value
    else:
        hint = option_hint(name, TrainConfig.__dataclass_fields__, made.command)
        here = hint[2:] if hint.startswith(("; here", ": ")) else "nothing here has this name"
        made.notes.append(f"{name} = {value!r}: {here}")


def _beta(value: object, made: Translation) -> None:
    if value:
        made.options |= {"init_kl_coef": value, "use_kl_loss": True, "kl_estimator": "k3"}


def _model(value: object, made: Translation) -> None:
    made.options["pretrain"] = value


def _trackers(value: object, made: Translation) -> None:
    switches = {"tensorboard": "use_tensorboard", "wandb": "use_wandb"}
    receivers: list[str] = []
    for each in value if isinstance(value, list | tuple) else [value]:
        if each in switches:
            made.options[switches[each]] = True
        elif each in LOGGERS:
            receivers.append(str(each))
        elif each not in ("none", None):
            _named("report_to", each, made)
    if receivers:
        made.options["loggers"] = tuple(receivers)


def _strategy(option: str) -> Callable[[object, Translation], None]:
    """Return a function that notes the strategy of an option that counts steps."""

    def choose(value: object, made: Translation) -> None:
        if str(value) == "no":
            made.options.pop(option, None)
        elif str(value) != "steps":
            made.notes.append(f"{value!r} instead of steps: choose {option}, in steps")

    return choose


def _length(value: object, made: Translation) -> None:
    if value is None:
        made.notes.append("max_length = None: choose max_row_tokens, above which rows are left out")
        return
    made.options["max_row_tokens"] = value
    made.notes.append(f"max_length = {value!r}: longer rows are left out here, TRL cuts them")


def _preference_losses(value: object, made: Translation) -> None:
    made.options["preference_loss"] = value if isinstance(value, list) else [value]


def _smoothing(value: object, made: Translation) -> None:
    if value:
        _named("label_smoothing", value, made)
        losses = made.options.get("preference_loss", ["sigmoid"])
        names = losses if isinstance(losses, list) else [losses]
        made.options["preference_loss"] = ["cdpo" if e == "sigmoid" else e for e in names]


def _optimizer(value: object, made: Translation) -> None:
    """Note 8-bit Adam, or that AdamW is the only alternative."""
    if "adam" in str(value) and "8bit" in str(value):
        made.options |= {"adam_8bit": True, "fsdp": True}
    elif not str(value).startswith("adamw_torch"):
        made.notes.append(f"optim: {value!r} has no counterpart, AdamW is taken")


_Special = Callable[[object, Translation], None]
_SPECIAL: dict[str, _Special] = {
    "eval_strategy": _strategy("eval_steps"),
    "logging_strategy": _strategy("logging_steps"),
    "save_strategy": _strategy("save_steps"),
    "model": _model,
    "optim": _optimizer,
    "r": lambda value, made: _named("lora_r", value, made),
    "report_to": _trackers,
}
_SPECIAL_OF: dict[str, dict[str, _Special]] = {
    "train": {"beta": _beta},
    "sft": {"max_length": _length},
    "prefer": {
        "loss_type": _preference_losses,
        "max_length": _length,
        "label_smoothing": _smoothing,
    },
    "reward": {"max_length": _length},
}


def translate_script(path: Path, folder: Path, processes: int = 1) -> str:
    """Write options and rewards of a script, and return what a person must check.

    Args:
        path: Script, which is read and not run.
        folder: New folder, or one without files of these names.
        processes: Number of processes of the run.

    Raises:
        UsageError: No such script, or files in the folder that would be lost.
        ConfigError: The script's options contradict each other.
    """
    script = read_script(path)
    made = translate(script.arguments, processes, script)
    notes = made.notes + script.notes
    notes += [f"{name}: cannot be read from {text!r}" for name, text in script.unread.items()]
    options = made.options
    if script.command == "train":
        options["input_key"] = "prompt"
        has_messages = _has_messages(script, str(options.get("prompt_data")))
        options.setdefault("apply_chat_template", has_messages)
    if script.rewards:
        options["reward_fn"] = tuple(f"{folder / REWARD_FILE}:{name}" for name in script.rewards)
    lacking = [name for name in ("pretrain", "prompt_data") if name not in options]
    notes += [f"{name} is missing: add it to {OPTIONS_FILE}" for name in lacking]
    try:
        config = TrainConfig.from_args(options)
    except ConfigError as err:
        raise ConfigError(f"{path}: {err}") from err
    values = {name: config.__dict__[name] for name in options}
    lines = [f"{name} = {format_toml(value)}" for name, value in values.items()]
    looks = [f"# look: {note}" for note in notes]
    files = {REWARD_FILE: script.reward_source} if script.rewards else {}
    files[OPTIONS_FILE] = "\n".join([*looks, *lines]) + "\n"
    kept = [name for name in files if (folder / name).exists()]
    if kept:
        raise UsageError(f"{folder} has {', '.join(kept)}: give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    command = f"lightrft {script.command} --config {folder / OPTIONS_FILE}"
    return "\n".join([f"wrote {', '.join(files)} to {folder}", *notes, f"next: {command}"])


def _has_messages(script: Script, source: str) -> bool:
    """Return whether prompts are messages: as the first row says, else as the rewards read them."""
    first = next(iter(scan_rows(source)), None) if local_files(source, "train") else None
    if isinstance(first, Row):
        return isinstance(first.columns.get("prompt"), list)
    # A reward that reads contents of messages: then prompts are chats.
    return any(text in script.reward_source for text in ("['content']", ".get('content'"))

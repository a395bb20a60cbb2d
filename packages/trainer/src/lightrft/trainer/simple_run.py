"""A whole run as one call: a model, rows and functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.render import found_keys
from lightrft.engines.media.media import MEDIA_KINDS
from lightrft.reporting.loggers import MetricsLogger
from lightrft.run.assembly import RunSummary, run_training
from lightrft.run.callbacks import Callback, require_callbacks
from lightrft.run.resume import RunPlan, plan_run
from lightrft.strategy.distributed.context import print_on_first_rank
from lightrft.trainer.inputs_from_python import GivenRows, Rows, named_functions

if TYPE_CHECKING:
    from typing import Unpack

    from lightrft.trainer.train_options import RowOptions, TrainOptions

Reward = str | Callable[..., object]
INPUTS_FOLDER = "inputs"


def train(
    model: str | Path,
    data: str | Path | Rows,
    reward: Reward | Sequence[Reward] = (),
    *,
    eval_data: str | Path | Rows | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[MetricsLogger | str] = (),
    stop_request: Callable[[], bool] | None = None,
    **options: Unpack[TrainOptions],
) -> RunSummary:
    """Train a policy by reinforcement, as `lightrft train` does.

    Under `torchrun` every process makes the same call. In a notebook the cell shows the curve.

    Args:
        model: Folder or hub name of the policy, as `pretrain`.
        data: Training prompts: rows (a list of mappings, a `datasets.Dataset`), which are kept in
            the run's folder with their images and sounds, or a value of `prompt_data`. From rows
            without a length, such as a generator, at most `max_samples` are read.
        reward: `f(prompts=, responses=, labels=, **columns) -> list of numbers or of dicts`, which
            receives the arguments that it has parameters for (`completions` are responses, too, as
            messages where prompts are); the name of a reward, or FILE.py:FUNCTION; or several of
            them, which are added.
        eval_data: Held-out prompts, likewise.
        callbacks: Callbacks around the steps on every rank.
        loggers: Further receivers of metrics on the first rank, or names as in the option.
        stop_request: See `run_training`.
        **options: Options of `TrainConfig`, also by names of other libraries that mean the same,
            and `peft_config`, a LoraConfig. `policy_loss` and `advantage_estimator` may be
            functions, too. Without `output_dir` a call uses the folder `lightrft_run`. If it cannot
            continue what is there it uses `lightrft_run_2` and so on, unless there are several
            processes.
            `lightrft_run` takes `lightrft_run_2` and so on, unless there are several processes.

    Raises:
        TypeError: There is no such option.
        ConfigError: Options that cannot be run, or two functions of one name.
        DataError: Rows that cannot be used.
        RunStoppedError, RunAlarmError, RewardError, ModelLoadError: See `run_training`.
    """
    rewards = [reward] if isinstance(reward, str) or callable(reward) else list(reward or ())
    values = {**options, **({"reward_fn": rewards} if rewards else {})}
    run = _Run(callbacks, loggers, stop_request)
    return run.train("train", model, {"prompt_data": data, "eval_data": eval_data}, values)


@dataclass(frozen=True, slots=True)
class RowTraining:
    """A stage that trains on rows, as one call: a model, and rows or their source; see `train`.

    Args:
        command: Command of lightrft that does the same.
    """

    command: str

    def __call__(
        self,
        model: str | Path,
        data: str | Path | Rows,
        *,
        eval_data: str | Path | Rows | None = None,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[MetricsLogger | str] = (),
        stop_request: Callable[[], bool] | None = None,
        **options: Unpack[RowOptions],
    ) -> RunSummary:
        """Train a model on rows; arguments and errors as for `train`."""
        run = _Run(callbacks, loggers, stop_request)
        sources = {"prompt_data": data, "eval_data": eval_data}
        return run.train(self.command, model, sources, options)


sft, prefer, reward = RowTraining("sft"), RowTraining("prefer"), RowTraining("reward")
# Its teacher is the option `teacher`.
distill = RowTraining("distill")


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of one call, with the objects that it passes beside its options."""

    callbacks: Sequence[Callback]
    loggers: Sequence[MetricsLogger | str]
    stop_request: Callable[[], bool] | None

    def train(
        self,
        command: str,
        model: str | Path,
        sources: Mapping[str, str | Path | Rows | None],
        options: Mapping[str, object],
    ) -> RunSummary:
        """Train as a command does; arguments and errors as for `train`."""
        require_callbacks(self.callbacks)
        if not isinstance(model, str | Path):
            raise ConfigError(
                f"model: expected a folder or a name, got {type(model).__name__}: write it with "
                "save_pretrained (model and tokenizer) and give that folder"
            )
        values = {**_without_peft(options), "pretrain": model}
        values["loggers"] = [item for item in self.loggers if isinstance(item, str)]
        receivers = [item for item in self.loggers if not isinstance(item, str)]
        is_open = "output_dir" not in values and int(os.environ.get("WORLD_SIZE", "1")) == 1
        files = _place_sources(values, sources)
        with named_functions(values) as named:
            config = TrainConfig().replaced(named, command).with_installed_backend()
            stage = {"train": "policy"}.get(command, command)
            if command == "distill":
                config = config.distilled()
                stage = config.distillation_stage
            if stage == "policy":
                if "prompt_data" in files:
                    config = config.replaced(found_keys(files["prompt_data"].first, config))
                config = config.overlapped(int(os.environ.get("WORLD_SIZE", "1")))
            # A folder of another run is refused, or left, before rows are put there.
            if is_open and not config.load_checkpoint:
                config, plan = _in_free_folder(config, stage, files)
            else:
                plan = plan_run(config, stage)
            for option, file in files.items():
                replace(file, path=Path(str(config.__dict__[option]))).write()
            return run_training(
                config,
                stage=stage,
                loggers=receivers,
                callbacks=self.callbacks,
                stop_request=self.stop_request,
                plan=plan,
            )


def _place_sources(
    values: dict[str, object], sources: Mapping[str, str | Path | Rows | None]
) -> dict[str, GivenRows]:
    """Set the options that name data, and return the files for the rows of a call."""
    keys = (f"{kind.plural}_key" for kind in MEDIA_KINDS.values())
    columns = [str(values[key]) for key in keys if key in values]
    folder = Path(str(values.get("output_dir", TrainConfig.output_dir))) / INPUTS_FOLDER
    limits = {"prompt_data": "max_samples", "eval_data": "max_eval_samples"}
    files: dict[str, GivenRows] = {}
    for option, rows in sources.items():
        if rows is None or isinstance(rows, str | Path):
            values[option] = rows
            continue
        if isinstance(rows, Iterable) and not isinstance(rows, Sized):
            limit = {**vars(TrainConfig()), **values}[limits[option]]
            rows = islice(rows, cast("int", limit))
        files[option] = GivenRows.of(rows, option.removesuffix("_data"), folder, columns)
        values[option] = str(files[option].path)
        values.setdefault("media_root", "/")  # files that the caller's rows name
    return files


def _in_free_folder(
    config: TrainConfig, stage: str, files: Mapping[str, GivenRows]
) -> tuple[TrainConfig, RunPlan]:
    """Return the configuration in the first numbered folder that is new or can be continued.

    With it comes the plan of the run there.

    Raises:
        ConfigError: No folder would do: the fault is not in a folder's contents.
    """
    base, number, moved = Path(config.output_dir), 1, config
    while True:
        try:
            plan = plan_run(moved, stage)
            if not plan.summary:
                break
        except ConfigError:
            if not Path(moved.output_dir).exists():
                raise
        number += 1
        folder = base.with_name(f"{base.name}_{number}")
        places = {name: folder / INPUTS_FOLDER / file.path.name for name, file in files.items()}
        moved = config.replaced({n: str(path) for n, path in places.items()})
        moved = moved.replaced({"output_dir": str(folder)})
    if number > 1:
        print_on_first_rank(None, f"output_dir = {moved.output_dir}: {base} holds another run")
    return moved, plan


def _without_peft(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options with those of adapters in the place of a LoraConfig.

    Raises:
        ConfigError: It is of another type, has unsupported settings, or is set twice.
    """
    values = dict(options)
    config = values.pop("peft_config", None)
    if config is None:
        return values
    remedy = "give lora_rank, lora_alpha, lora_dropout and target_modules"
    peft = sys.modules.get("peft")  # whoever has a LoraConfig has imported it
    if peft is None or not isinstance(config, peft.LoraConfig):
        kind = type(config).__name__
        raise ConfigError(f"peft_config: expected a LoraConfig, got {kind}: {remedy}")
    usual = type(config)().to_dict()
    # Beside the rank, options of adapters have PEFT's names.
    options_of = {"r": "lora_rank"} | {name: name for name in usual.keys() & vars(TrainConfig())}
    known = {*options_of, "task_type", "base_model_name_or_path", "inference_mode", "revision"}
    settings = {name: value for name, value in config.to_dict().items() if value != usual[name]}
    odd = [f"{name}={value!r}" for name, value in settings.items() if name not in known]
    twice = [option for option in options_of.values() if option in values]
    if odd or twice:
        what = f"{', '.join(odd)} has no counterpart" if odd else f"{twice[0]} is given as well"
        raise ConfigError(f"peft_config: {what}: leave it out, or {remedy}")
    for name, option in options_of.items():
        value = getattr(config, name)
        if name != "target_modules":
            values[option] = value
        elif value is not None:
            values[option] = (value,) if isinstance(value, str) else tuple(sorted(value))
    return values

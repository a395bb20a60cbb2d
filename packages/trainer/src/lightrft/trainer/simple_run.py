"""A whole run as one call: a model, rows and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.render import found_keys
from lightrft.engines.media.media import MEDIA_KINDS
from lightrft.run.assembly import RunSummary, run_training
from lightrft.run.callbacks import Callback
from lightrft.run.resume import plan_run
from lightrft.trainer.given_inputs import GivenRows, Rows, named_functions

if TYPE_CHECKING:
    from typing import Unpack

    from lightrft.reporting.loggers import MetricsLogger
    from lightrft.trainer.train_options import TrainOptions

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
    """Trains a policy by reinforcement, as `lightrft train` does.

    Under `torchrun` every process makes the same call. In a notebook the cell shows the curve.

    Args:
        model: Folder or hub name of the policy, as `pretrain`.
        data: Training prompts: rows (a list of mappings, a `datasets.Dataset`), which are kept in
            the run's folder with their images and sounds, or what `prompt_data` takes. Of rows
            without a length, as a generator has, at most `max_samples` are read.
        reward: `f(prompts=, responses=, labels=, **columns) -> list of numbers or of dicts`, of
            which a function takes what it has parameters for (`completions` are responses, too,
            as messages where prompts are); the name of a reward, or FILE.py:FUNCTION; or several
            of them, which are added.
        eval_data: Held-out prompts, likewise.
        callbacks: Called around the steps on every rank.
        loggers: Further receivers of metrics on the first rank, or names as the option takes.
        stop_request: See `run_training`.
        **options: Options of `TrainConfig`. `policy_loss` and `advantage_estimator` may be
            functions, too.

    Raises:
        TypeError: There is no such option.
        ConfigError: Options that cannot be run, or two functions of one name.
        DataError: Rows that cannot be used.
        RunStoppedError, RunAlarmError, RewardError, ModelLoadError: See `run_training`.
    """
    rewards = [reward] if isinstance(reward, str) or callable(reward) else list(reward or ())
    given: dict[str, object] = {**options, "pretrain": _model_name(model), "reward_fn": rewards}
    given["loggers"] = [item for item in loggers if isinstance(item, str)]
    receivers = [item for item in loggers if not isinstance(item, str)]
    folder = Path(str(given.get("output_dir", TrainConfig.output_dir))) / INPUTS_FOLDER
    keys = (f"{kind.plural}_key" for kind in MEDIA_KINDS.values())
    columns = [str(given[key]) for key in keys if key in given]
    files: list[GivenRows] = []
    inputs = (("prompt_data", data, "max_samples"), ("eval_data", eval_data, "max_eval_samples"))
    for option, rows, limit in inputs:
        if rows is None or isinstance(rows, str | Path):
            given[option] = None if rows is None else str(rows)
        else:
            if isinstance(rows, Iterable) and not isinstance(rows, Sized):
                rows = islice(rows, cast("int", {**vars(TrainConfig()), **given}[limit]))
            files.append(GivenRows.of(rows, option.removesuffix("_data"), folder, columns))
            given[option] = str(files[-1].path)
            given.setdefault("media_root", "/")  # files that the caller's own rows name
    with named_functions(given) as named:
        config = TrainConfig().replaced(named).with_installed_backend()
        for file in files[:1]:
            if str(file.path) == config.prompt_data:
                config = config.replaced(found_keys(file.first, config))
        plan_run(config, "policy")  # refuses a folder of another run before rows are put there
        for file in files:
            file.write()
        return run_training(
            config, loggers=receivers, callbacks=callbacks, stop_request=stop_request
        )


def _model_name(model: str | Path) -> str:
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"model: expected a folder or a name, got {type(model).__name__}: write it with "
            "save_pretrained (model and tokenizer) and give that folder"
        )
    return str(model)

"""Experiment trackers, checked before the run; their failures never end it.

Each tracker has an adapter here: a function that takes the options of the run and returns a
`BestEffortLogger`. Data stays on the machine unless the user's environment sends it elsewhere.
"""

from collections.abc import Callable
from typing import cast

from lightrft.config import ConfigError, OutputOptions, TrainConfig
from lightrft.config.registry import LOGGERS, Registry, installation_of, missing_module
from lightrft.reporting.loggers import MetricsLogger
from lightrft.reporting.trackers.best_effort import TrackerError

# Trackers with dedicated options; the others are names of the option `loggers`.
_BY_OPTION = Registry(
    "tracker",
    {
        "use_tensorboard": f"{__name__}.tensorboard:open_tensorboard",
        "use_wandb": f"{__name__}.wandb:open_wandb",
    },
    takes_own=False,
)


def asked_loggers(config: TrainConfig) -> list[MetricsLogger]:
    """Build the trackers, and the user's loggers: each `CLASS(config)` of the option `loggers`.

    Raises:
        ConfigError: One cannot be loaded or built, or lacks `log` or `close`.
        TrackerError: A tracker cannot be used.
    """
    made = build_trackers(config)
    for name in config.loggers:
        if LOGGERS.is_built_in(name):
            continue
        build = LOGGERS.load(name)
        try:
            logger = cast("Callable[[TrainConfig], MetricsLogger]", build)(config)
        except Exception as error:
            raise ConfigError(
                f"loggers: {name}(config) failed: {type(error).__name__}: {error}"
            ) from error
        if not all(callable(getattr(logger, method, None)) for method in ("log", "close")):
            raise ConfigError(f"loggers: {name} needs log(step, metrics) and close()")
        made.append(logger)
    return made


def build_trackers(config: OutputOptions) -> list[MetricsLogger]:
    """Return the requested trackers, ready to use; to be called on the first rank only.

    Raises:
        TrackerError: One cannot be used.
    """
    asked = [(f"--{name}", _BY_OPTION, name) for name in _BY_OPTION if getattr(config, name)]
    built_in = filter(LOGGERS.is_built_in, config.loggers)
    asked += [(f"--loggers {name}", LOGGERS, name) for name in built_in]
    trackers = []
    for option, registry, name in asked:
        try:
            build = cast("Callable[[OutputOptions], MetricsLogger]", registry.load(name))
            trackers.append(build(config))
        except Exception as error:
            module = missing_module(error)
            problem = f"{error}; fix it" if module is None else f"{installation_of(module)}"
            raise TrackerError(
                f"{option}: cannot be used: {problem}, or leave the option out"
            ) from error
    return trackers

"""Experiment trackers, checked before the run; their failures never end it.

Each tracker has an adapter here: a function that takes the options of the run and returns a
`BestEffortLogger`. Data stays on the machine unless the user's environment sends it elsewhere.
"""

from collections.abc import Callable
from typing import cast

from lightrft.config import OutputOptions
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

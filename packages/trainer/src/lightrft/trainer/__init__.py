"""Trainers, their options, and whole runs."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.trainer.reporting.loggers import MetricsLogger as MetricsLogger
    from lightrft.trainer.runs.assembly import (
        RunSummary as RunSummary,
        run_training as run_training,
    )
    from lightrft.trainer.spmd_ppo_trainer import (
        SPMDPPOTrainer as SPMDPPOTrainer,
        SPMDPPOTrainerBase as SPMDPPOTrainerBase,
        SPMDPPOTrainerVL as SPMDPPOTrainerVL,
    )
    from lightrft.trainer.training.metrics import StepMetrics as StepMetrics

_MODULES = {
    "MetricsLogger": "reporting.loggers",
    "RunSummary": "runs.assembly",
    "SPMDPPOTrainer": "spmd_ppo_trainer",
    "SPMDPPOTrainerBase": "spmd_ppo_trainer",
    "SPMDPPOTrainerVL": "spmd_ppo_trainer",
    "StepMetrics": "training.metrics",
    "run_training": "runs.assembly",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

"""Trainers, their options, and whole runs."""

from typing import TYPE_CHECKING

from lightrft.kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lightrft.reporting.loggers import MetricsLogger as MetricsLogger
    from lightrft.run.assembly import RunSummary as RunSummary, run_training as run_training
    from lightrft.run.callbacks import Callback as Callback
    from lightrft.stages.metrics import StepMetrics as StepMetrics
    from lightrft.trainer.simple_run import (
        distill as distill,
        prefer as prefer,
        reward as reward,
        sft as sft,
        train as train,
    )
    from lightrft.trainer.spmd_ppo_trainer import (
        SPMDPPOTrainer as SPMDPPOTrainer,
        SPMDPPOTrainerBase as SPMDPPOTrainerBase,
        SPMDPPOTrainerVL as SPMDPPOTrainerVL,
    )
    from lightrft.trainer.stage_trainers import (
        DistillationTrainer as DistillationTrainer,
        PreferenceTrainer as PreferenceTrainer,
        RewardTrainer as RewardTrainer,
        SFTTrainer as SFTTrainer,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

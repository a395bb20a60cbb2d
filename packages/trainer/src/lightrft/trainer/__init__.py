"""Trainers, their options, and whole runs."""

from typing import TYPE_CHECKING

from lightrft.kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lightrft.reporting.loggers import MetricsLogger as MetricsLogger
    from lightrft.run.assembly import RunSummary as RunSummary, run_training as run_training
    from lightrft.run.callbacks import Callback as Callback
    from lightrft.stages.metrics import StepMetrics as StepMetrics
    from lightrft.trainer.distillation_trainer import DistillationTrainer as DistillationTrainer
    from lightrft.trainer.preference_trainer import PreferenceTrainer as PreferenceTrainer
    from lightrft.trainer.reward_trainer import RewardTrainer as RewardTrainer
    from lightrft.trainer.sft_trainer import SFTTrainer as SFTTrainer
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

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

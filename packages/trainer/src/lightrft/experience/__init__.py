"""From prompts to what a trainer learns from: rollouts, rewards, model outputs, advantages."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.experience.assemble import AdvantageSettings as AdvantageSettings
    from lightrft.experience.assemble import RewardShaping as RewardShaping
    from lightrft.experience.exchange import SampleTable as SampleTable
    from lightrft.experience.forward import ForwardModels as ForwardModels
    from lightrft.experience.maker import ExperienceMaker as ExperienceMaker
    from lightrft.experience.maker import StepExperience as StepExperience
    from lightrft.experience.minibatches import MinibatchPlan as MinibatchPlan
    from lightrft.experience.sampling import MakerSettings as MakerSettings
    from lightrft.experience.types import ExperienceBatch as ExperienceBatch
    from lightrft.experience.types import PolicyOutputs as PolicyOutputs
    from lightrft.experience.types import Rollout as Rollout
    from lightrft.experience.types import RolloutBatch as RolloutBatch
    from lightrft.experience.types import ScoredRollout as ScoredRollout

_MODULES = {
    "AdvantageSettings": "assemble",
    "ExperienceBatch": "types",
    "ExperienceMaker": "maker",
    "ForwardModels": "forward",
    "MakerSettings": "sampling",
    "MinibatchPlan": "minibatches",
    "PolicyOutputs": "types",
    "RewardShaping": "assemble",
    "Rollout": "types",
    "RolloutBatch": "types",
    "SampleTable": "exchange",
    "ScoredRollout": "types",
    "StepExperience": "maker",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

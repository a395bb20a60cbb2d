"""Policies and value models on top of transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.models.actor import Actor
    from lightrft.models.critic import Critic
    from lightrft.models.head import LinearLogprobHead
    from lightrft.models.layout import LayoutPolicy, TokenLayout
    from lightrft.models.loading import (
        ModelLoadError,
        load_causal_lm,
        load_config,
        load_tokenizer,
        load_trunk,
        save_pretrained,
    )
    from lightrft.models.logprobs import entropy_from_logits, logprobs_from_logits
    from lightrft.models.lora import LoraActor, LoraSettings
    from lightrft.models.presets import byte_level_tokenizer, write_tiny_model
    from lightrft.models.reward_model import RewardModel
    from lightrft.models.sequence_model import SequenceModel
    from lightrft.models.types import ActorOutput, EntropyMode, PolicyModel, ValueModel

_MODULES = {
    "Actor": "actor",
    "ActorOutput": "types",
    "Critic": "critic",
    "EntropyMode": "types",
    "LayoutPolicy": "layout",
    "LinearLogprobHead": "head",
    "LoraActor": "lora",
    "LoraSettings": "lora",
    "ModelLoadError": "loading",
    "PolicyModel": "types",
    "RewardModel": "reward_model",
    "SequenceModel": "sequence_model",
    "TokenLayout": "layout",
    "ValueModel": "types",
    "byte_level_tokenizer": "presets",
    "entropy_from_logits": "logprobs",
    "load_causal_lm": "loading",
    "load_config": "loading",
    "load_tokenizer": "loading",
    "load_trunk": "loading",
    "logprobs_from_logits": "logprobs",
    "save_pretrained": "loading",
    "write_tiny_model": "presets",
}

__all__ = [
    "Actor",
    "ActorOutput",
    "Critic",
    "EntropyMode",
    "LayoutPolicy",
    "LinearLogprobHead",
    "LoraActor",
    "LoraSettings",
    "ModelLoadError",
    "PolicyModel",
    "RewardModel",
    "SequenceModel",
    "TokenLayout",
    "ValueModel",
    "byte_level_tokenizer",
    "entropy_from_logits",
    "load_causal_lm",
    "load_config",
    "load_tokenizer",
    "load_trunk",
    "logprobs_from_logits",
    "save_pretrained",
    "write_tiny_model",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)

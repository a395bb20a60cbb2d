"""Policies and value models on top of transformers."""

from typing import TYPE_CHECKING

from lightrft.kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lightrft.models.actor import Actor as Actor
    from lightrft.models.critic import Critic as Critic
    from lightrft.models.layout import TokenLayout as TokenLayout
    from lightrft.models.loading import (
        ModelLoadError as ModelLoadError,
        load_causal_lm as load_causal_lm,
        load_config as load_config,
        load_tokenizer as load_tokenizer,
        load_trunk as load_trunk,
    )
    from lightrft.models.lora import LoraActor as LoraActor
    from lightrft.models.reward_model import RewardModel as RewardModel
    from lightrft.models.sequence_model import SequenceModel as SequenceModel
    from lightrft.models.types import ActorOutput as ActorOutput

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

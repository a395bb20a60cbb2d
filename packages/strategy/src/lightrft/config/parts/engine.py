"""Options of one part of a run: the rollout engine, and how weights reach it."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from lightrft.config.options import (
    EVAL,
    Arguments,
    engine_option,
)

EngineType = Literal["vllm", "sglang", "hf", "auto"]


# Adapters travel as part of the weights that they change.
MERGED = "merged"


ENGINE_TYPES: tuple[str, ...] = typing.get_args(EngineType)


@dataclass(kw_only=True)
class EngineOptions:
    """The rollout engine, and how weights reach it."""

    engine_type: str = engine_option(
        "vllm",
        "Rollout engine.",
        choices=ENGINE_TYPES,
        common=True,
        commands=EVAL,
    )
    engine_tp_size: int = engine_option(
        1,
        "Ranks that share one engine (tensor parallelism).",
        at_least=1,
        commands=EVAL,
    )
    engine_mem_util: float = engine_option(
        0.5,
        "Share of device memory the engine may take.",
        above=0,
        at_most=1,
        may_change=True,
        commands=EVAL,
    )
    enable_engine_sleep: bool = engine_option(
        True,
        "Release the engine's memory while the trainer runs.",
        may_change=True,
    )
    engine_args: Arguments = engine_option(
        None,
        "Further options under the engine's own names.",
        commands=EVAL,
    )
    max_len: int | None = engine_option(
        None,
        "Longest prompt plus completion, in tokens.",
        at_least=1,
    )
    weight_bucket_mb: int = engine_option(
        256,
        "Size of one weight transfer bucket.",
        at_least=1,
        may_change=True,
    )
    lora_sync: str = engine_option(
        MERGED,
        "What goes to the engine with lora_rank: merged weights, or the adapters alone to an "
        "engine that holds them beside its weights (hf, vllm).",
        choices=(MERGED, "adapter"),
        acts_with="lora_rank",
    )
    verify_weight_sync: bool = engine_option(
        True,
        "Compare hashes of the trainer's and the engine's weights.",
        may_change=True,
    )
    rm_use_engine: bool = engine_option(
        False,
        "Serve reward models by an engine.",
    )
    rm_engine_cudagraph: bool = engine_option(
        False,
        "CUDA graphs in the reward engine.",
    )

"""Rules between the sources of prompts and the options that choose among and within them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.datasets.files import has_splits
from lightrft.datasets.mixture import probability_problem, split_sources

if TYPE_CHECKING:
    from collections.abc import Collection

    from lightrft.trainer.config import TrainConfig


def wrong_probabilities(config: TrainConfig, wrong_fields: Collection[str]) -> str | None:
    """Why prompt_data_probs does not fit prompt_data; None if it does, or if one is wrong alone."""
    if not {"prompt_data_probs", "prompt_data"}.isdisjoint(wrong_fields):
        return None
    return probability_problem(split_sources(config.prompt_data or ""), config.prompt_data_probs)


def have_splits(text: str | None) -> bool:
    """Whether any of some sources has parts with names."""
    return text is not None and any(map(has_splits, split_sources(text)))

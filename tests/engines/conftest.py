from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.models.tiny import SPECIAL, WIDE, tiny_model as build_model
from transformers import PreTrainedModel

_SHAPE = {**WIDE, **SPECIAL, "vocab_size": 97, "max_position_embeddings": 256}


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Builds a small random model: family, whether head and embedding are tied, seed."""

    def build(family: str = "qwen3", *, is_tied: bool = False, seed: int = 0) -> PreTrainedModel:
        return build_model(family, seed=seed, tie_word_embeddings=is_tied, **_SHAPE).eval()

    return build

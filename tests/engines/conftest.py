import pytest
from tests.models.tiny import SPECIAL, WIDE, tiny_model as build_model

_SHAPE = {**WIDE, **SPECIAL, "vocab_size": 97, "max_position_embeddings": 256}


@pytest.fixture(scope="session")
def tiny_model():
    """Builds a small random model: family, whether head and embedding are tied, seed."""

    def build(family="qwen3", *, is_tied=False, seed=0):
        return build_model(family, seed=seed, tie_word_embeddings=is_tied, **_SHAPE).eval()

    return build

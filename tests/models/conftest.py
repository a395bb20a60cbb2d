"""Tiny checkpoints, one with and one without tied embeddings."""

import pytest

from lightrft.tools.model_presets import write_tiny_model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Directory of each preset's checkpoint."""
    directories = {}
    for preset in ("tiny-qwen3", "tiny-llama"):
        directory = tmp_path_factory.mktemp(preset)
        write_tiny_model(directory, preset, seed=1)
        directories[preset] = str(directory)
    return directories


@pytest.fixture(params=["tiny-qwen3", "tiny-llama"], ids=["untied", "tied"])
def checkpoint(request, checkpoints):
    return checkpoints[request.param]

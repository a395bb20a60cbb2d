"""Tiny models for runs of all stages."""

import pytest
from tests.runs import tiny_models


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder of a student and of two teachers."""
    return tiny_models(tmp_path_factory.mktemp("stages"), "student", "teacher", "second")


@pytest.fixture(scope="session")
def model(models):
    """Path of a tiny model."""
    return str(models / "student")

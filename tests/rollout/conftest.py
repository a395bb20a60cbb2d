"""Stages of the folder, and workers that end with the module that started them."""

import pytest
from tests.rollout import stages


@pytest.fixture(scope="module", autouse=True)
def close_pools():
    yield
    stages.close_pools()


@pytest.fixture
def stage(tmp_path):
    """A function of what a model says and of options; see `Stage`."""

    def make(script, **options):
        return stages.Stage(tmp_path, script, **options)

    return make

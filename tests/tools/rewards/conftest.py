"""Judges, written once for each module."""

import pytest
from tests.tools.rewards.judge_world import write_judges


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """See `write_judges`."""
    return write_judges(tmp_path_factory.mktemp("judging"))

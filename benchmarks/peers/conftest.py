"""Comparisons with other packages have the fixtures and the hooks of the tests."""

from tests.conftest import *  # noqa: F403

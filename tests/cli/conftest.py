"""What tests of commands share."""

import pytest

PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def alone(monkeypatch):
    """What the run sets in the environment is undone afterwards."""
    for name in PROCESS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

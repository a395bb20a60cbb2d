"""The very small model, and one recorded and audited step of it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from lightrft.tools.audit.report import audit_step


def load_world():
    """Tests are no packages, so their helper is loaded by its path."""
    name = "audit_world"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("world.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def world():
    return load_world()


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory, world):
    return world.write_model(tmp_path_factory.mktemp("audit") / "micro")


@pytest.fixture(scope="session")
def micro_teacher(tmp_path_factory, world):
    return world.write_model(tmp_path_factory.mktemp("audit") / "teacher", seed=2)


@pytest.fixture
def audited(world, micro_model, micro_teacher, tmp_path):
    """Records a step with some options, and audits it; any teacher is the one there is."""

    def run(changes, **how):
        if "teacher" in changes:
            changes = {**changes, "teacher": micro_teacher}
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        world.record_step(micro_model, tmp_path / "run", changes, **how)
        return audit_step(tmp_path / "run")

    return run

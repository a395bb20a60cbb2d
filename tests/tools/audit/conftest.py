"""The very small model, and one recorded and audited step of it."""

from __future__ import annotations

import shutil

import pytest
from tests.tools.audit import world as step_world

from lightrft.tools.audit.report import audit_step


@pytest.fixture(scope="session")
def world():
    return step_world


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory):
    return step_world.write_model(tmp_path_factory.mktemp("audit") / "micro")


@pytest.fixture(scope="session")
def micro_teacher(tmp_path_factory):
    return step_world.write_model(tmp_path_factory.mktemp("audit") / "teacher", seed=2)


@pytest.fixture
def audited(micro_model, micro_teacher, tmp_path):
    """Records a step with some options, and audits it; any teacher is the one there is."""

    def run(changes, **how):
        if "teacher" in changes:
            changes = {**changes, "teacher": micro_teacher}
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        step_world.record_step(micro_model, tmp_path / "run", changes, **how)
        return audit_step(tmp_path / "run")

    return run

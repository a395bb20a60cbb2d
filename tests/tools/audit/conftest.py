"""The very small model, and one recorded and audited step of it."""

from __future__ import annotations

import shutil

import pytest
from tests.tools.audit import world as audit_world

from lightrft.tools.audit.findings import DIFFERS, NOT_AUDITED
from lightrft.tools.audit.report import audit_step


@pytest.fixture(scope="session")
def world():
    return audit_world


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory):
    return audit_world.write_model(tmp_path_factory.mktemp("audit") / "micro")


@pytest.fixture(scope="session")
def micro_teacher(tmp_path_factory):
    return audit_world.write_model(tmp_path_factory.mktemp("audit") / "teacher", seed=2)


@pytest.fixture
def audited(micro_model, micro_teacher, tmp_path):
    """Record a step with some options, and audit it; any teacher is the one there is."""

    def run(changes, **how):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        options = audit_world.with_teacher(changes, micro_teacher)
        audit_world.record_step(micro_model, tmp_path / "run", options, **how)
        return audit_step(tmp_path / "run")

    return run


@pytest.fixture
def audited_without_alarm(audited):
    """Record and audit a step in which nothing differs and much is compared."""

    def run(changes, **how):
        report = audited(changes, **how)
        assert [row for row in report.rows if row.verdict == DIFFERS] == []
        assert sum(row.verdict != NOT_AUDITED for row in report.rows) > 10
        return report

    return run

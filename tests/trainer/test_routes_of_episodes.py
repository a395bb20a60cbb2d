"""Episodes and agents of a mixture of experts: its experts are recorded, replayed and audited."""

import pytest
from tests import runs
from tests.models.moe_types import write_moe
from tests.trainer import (
    test_agent_run as agents,
    test_environment_run as episodes,
    test_streamed_episodes as streamed,
)

from lightrft.cli.errors import ExitCode
from lightrft.tools.audit.findings import DIFFERS, EQUAL
from lightrft.tools.audit.report import audit_step
from lightrft.tools.replay import run_replay as replay

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    write_moe(folder / "model")
    files = {"template.jinja": episodes.TEMPLATE}
    runs.write_inputs(folder, runs.say_rows(8), reward=episodes.REWARD, files=files)
    return folder


@pytest.mark.parametrize("kind, options", [(episodes, {"audit_every": 1}), (agents, {})])
def test_experts_of_every_turn_are_replayed(folder, kind, options, monkeypatch):
    ((metrics, output),) = kind.run(folder, 1, [options])
    assert metrics["routes_other_share"] < 0.02
    assert metrics["logprob_diff_max"] < 1e-4
    if options:  # agents exclude it
        assert not [row for row in audit_step(output).rows if row.verdict == DIFFERS]
    monkeypatch.setattr(replay, "training_params", runs.with_stops)
    _, replayed = replay.replay_run(output, None)
    assert not replayed.differences
    assert replayed.num_turns > 16


def test_experts_of_episodes_over_several_steps_are_audited(folder, tmp_path):
    """Their context is computed again by newer weights."""
    (tmp_path / "model").symlink_to(folder / "model")
    assert streamed.train(tmp_path, parity_check_steps=0) == ExitCode.OK
    metrics = runs.lines(tmp_path / "out/metrics.jsonl")
    assert max(row["routes_other_share"] for row in metrics) > 0
    for step in range(1, 5):
        verdicts = {row.quantity: row.verdict for row in audit_step(tmp_path / "out", step).rows}
        assert DIFFERS not in verdicts.values()
        assert verdicts["engine logprobs"] == EQUAL
        assert ("engine logprobs of older weights" in verdicts) == (step > 1)

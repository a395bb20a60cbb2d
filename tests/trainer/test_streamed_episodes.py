"""Runs whose episodes go on over several steps, as commands; `test_rollout_ranks.py` kills them."""

import pytest
from tests import runs
from tests.trainer import test_killed_episodes as episodes
from tests.trainer.test_environment_run import REWARD

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main
from lightrft.rollout.environments.calls import ToolCall
from lightrft.tools.audit.findings import DIFFERS
from lightrft.tools.audit.report import audit_step


def train(folder, **changes):
    """Code of the command for a run of four steps; random models call in each turn."""
    if not (folder / "model").exists():
        runs.tiny_models(folder, "model")
    runs.write_inputs(
        folder,
        runs.say_rows(12),
        reward=REWARD,
        files={"mixer.py": episodes.ENVIRONMENT, "template.jinja": runs.TEMPLATE},
    )
    common = {
        "reward_fn": f"{folder / 'reward.py'}:score",
        "environment": f"{folder / 'mixer.py'}:Mixer",
        "max_steps": 4,
        "audit_every": 1,
        "num_episodes": 3,
        "prompt_max_len": 64,
        "generate_max_len": 10,
        "stream_chunk": 5,
        "max_staleness": 2,
    }
    options = episodes.settings(folder, "out") | common | changes
    with runs.calling(ToolCall("mix", {"number": 3})):
        return main(["train", *runs.words(options)])


@pytest.mark.full
@pytest.mark.parametrize(
    "late", [{}, {"tool_lag": 1, "stream_chunk": 10}], ids=["waited for", "late"]
)
def test_the_command_streams_episodes_and_its_steps_are_audited(tmp_path, late):
    assert train(tmp_path, **late) == ExitCode.OK
    rows = runs.lines(tmp_path / "out/metrics.jsonl")
    assert len(rows) == 4
    assert max(row["staleness/max"] for row in rows) > 0
    assert all(row["episode/turns"] > 1 and row["reward/Mixer"] >= 0 for row in rows)
    assert rows[-1]["stream/open_groups"] == 0
    for step in range(1, 5):
        report = audit_step(tmp_path / "out", step)
        assert [row for row in report.rows if row.verdict == DIFFERS] == []
    assert len(runs.lines(tmp_path / "out/samples.jsonl")) == 4 * 8


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"late_join": True}, "stream_chunk excludes late_join"),
        ({"environment": "openenv:http://127.0.0.1:9"}, "stream_chunk excludes environment open"),
    ],
)
def test_what_open_episodes_cannot_do_is_refused(tmp_path, changes, says, capsys):
    assert train(tmp_path, **changes) == ExitCode.USAGE
    assert says in capsys.readouterr().err

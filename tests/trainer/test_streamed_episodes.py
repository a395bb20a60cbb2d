"""Runs whose episodes go on over several steps: as commands, over ranks, and killed in the middle.

A run is killed once its environments have been asked so often, so that the kill lies within a round
of its episodes; the next process has to bring back those that were open in the last checkpoint.
"""

import random
import shutil
import sys
import time
from pathlib import Path

import pytest
from tests import runs
from tests.machine import seconds
from tests.trainer import test_killed_episodes as episodes
from tests.trainer.test_environment_run import REWARD

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main
from lightrft.rollout.environments.calls import ToolCall
from lightrft.tools.audit.findings import DIFFERS
from lightrft.tools.audit.report import audit_step

kills = episodes.kills
NUM_STEPS = 5
STREAM = {"stream_chunk": 4, "stream_prompts": 8, "max_staleness": 2}
# Episodes wait for answers and not for their chunks.
LATE = {"tool_lag": 1, "stream_chunk": 8, "max_staleness": 4}
# Says in a file that it was asked.
NOTED = '''
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import mixer


class Noted(mixer.Mixer):
    async def mix(self, number: int) -> str:
        """Mix a number in.

        Args:
            number: Any.
        """
        with Path(__file__).with_suffix(".calls").open("a") as file:
            file.write("x")
        return await super().mix(number)
'''


def settings(folder, name, **changes):
    own = {"environment": f"{folder / 'noted.py'}:Noted", "max_steps": NUM_STEPS}
    return episodes.settings(folder, name) | own | {"num_episodes": 3} | STREAM | changes


def result(options):
    return kills.result(options, models=("_actor",), num_steps=NUM_STEPS)


def num_calls(folder):
    path = folder / "noted.calls"
    return path.stat().st_size if path.exists() else 0


def kill_once(options, folder, world_size, whole_calls, dice):
    """Starts and kills after a random call; what was killed, None if the run had ended."""
    output = Path(options["output_dir"])
    left = 1 - kills.num_lines(output / "metrics.jsonl") / NUM_STEPS
    wanted, before = dice.randrange(1, max(2, int(left * whole_calls))), num_calls(folder)
    ranks = kills.Ranks(options, world_size)
    limit = time.monotonic() + seconds(kills.RUN_SECONDS)
    while ranks.running() and num_calls(folder) - before < wanted:
        assert time.monotonic() < limit, ranks.log.read_text()[-3000:]
        time.sleep(0.002)
    running = ranks.running()
    chosen = running if len(running) < 2 else dice.choice([running, running[:1], running[1:]])
    ranks.kill(chosen)
    if len(running) < world_size or (output / "summary.json").exists():
        return None
    return f"call {wanted}, {len(chosen)} killed"


def run_all(rank, world_size, folder, num_runs, chain, seed):
    """Kills every run `chain` times."""
    kills.become_launcher()
    folder, dice, num_kills = Path(folder), random.Random(seed), 0
    episodes.write_inputs(folder)
    (folder / "noted.py").write_text(NOTED)
    episodes.let_random_models_call()
    whole = {}
    for number in range(num_runs):
        size = 1 + number % 2
        lag = {"rollout_lag": int(number % 4 == 3)}
        lag |= LATE if number % 3 == 1 else {}
        form = (size, *lag.values())
        if form not in whole:
            options, before = settings(folder, f"whole_{number}", **lag), num_calls(folder)
            kills.finish(options, size)
            kills.import_modules(Path(f"{options['output_dir']}.modules"))
            whole[form] = result(options), num_calls(folder) - before
            rows = whole[form][0]["metrics.jsonl"]
            assert all(row["stream/open_groups"] > 0 for row in rows[:-2])
            assert max(row["staleness/max"] for row in rows) > lag["rollout_lag"]
        expected, calls = whole[form]
        options, done = settings(folder, f"killed_{number}", **lag), []
        while len(done) < chain:
            found = kill_once(options, folder, size, calls, dice)
            if found is None:  # it had ended: another try from the beginning
                shutil.rmtree(options["output_dir"])
            done = [] if found is None else [*done, found]
        kills.finish(options, size)
        kills.require_same_end(result(options), expected, (form, done))
        num_kills += len(done)
        print(f"{num_kills} kills, last of {size} ranks, {lag}, after {done}", file=sys.stderr)
    return num_kills


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.shard("episode_kills")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("num_runs", "chain"),
    [(2, 2), pytest.param(12, 3, marks=pytest.mark.slow)],
    ids=["4 kills", "36 kills"],
)
def test_a_run_killed_while_episodes_are_open_ends_as_one_that_nobody_killed(
    tmp_path, num_runs, chain
):
    kills.kill_in_a_process(run_all, tmp_path, num_runs, chain)


def train(folder, **changes):
    """Code of the command for a run of four steps; random models call in each turn."""
    runs.write_inputs(
        runs.tiny_models(folder, "model"),
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
    rows = runs.lines(tmp_path / "out" / "metrics.jsonl")
    assert len(rows) == 4
    assert max(row["staleness/max"] for row in rows) > 0
    assert all(row["episode/turns"] > 1 and row["reward/Mixer"] >= 0 for row in rows)
    assert rows[-1]["stream/open_groups"] == 0
    for step in range(1, 5):
        report = audit_step(tmp_path / "out", step)
        assert [row for row in report.rows if row.verdict == DIFFERS] == []
    assert len(runs.lines(tmp_path / "out" / "samples.jsonl")) == 4 * 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"late_join": True}, "stream_chunk excludes late_join"),
        ({"environment": "openenv:http://127.0.0.1:9"}, "stream_chunk excludes environment open"),
    ],
)
def test_what_open_episodes_cannot_do_is_refused(tmp_path, changes, says, capsys):
    assert train(tmp_path, **changes) == ExitCode.USAGE
    assert says in capsys.readouterr().err

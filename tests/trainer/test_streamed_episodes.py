"""Runs whose episodes go on over several steps: as commands, over ranks, and killed in the middle.

A run is killed once its environments have been asked so often, so that the kill lies within a round
of its episodes; the next process has to bring back those that were open in the last checkpoint.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from pathlib import Path

import pytest
from tests.machine import seconds
from tests.ranks import run_multiprocess
from tests.trainer import test_killed_episodes as episodes
from tests.trainer.test_environment_run import REWARD, with_stops

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main
from lightrft.rollout import sampler as sampling
from lightrft.rollout.environments import specs
from lightrft.rollout.environments.call_formats import ToolCall
from lightrft.tools.audit.findings import DIFFERS
from lightrft.tools.audit.report import audit_step
from lightrft.tools.model_presets import write_tiny_model

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
    return {
        **episodes.settings(folder, name),
        "environment": f"{folder / 'noted.py'}:Noted",
        "max_steps": NUM_STEPS,
        "num_episodes": 3,
        **STREAM,
        **changes,
    }


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


def run_both_forms(rank, world_size, folder):
    """The weights and samples of a run without and with streaming, whose chunks hold episodes."""
    kills.become_launcher()
    folder = Path(folder)
    episodes.write_inputs(folder)
    (folder / "noted.py").write_text(NOTED)
    episodes.let_random_models_call()
    found = []
    for name, chunk in (("plain", None), ("streamed", 99)):
        stream = {"stream_chunk": chunk, "stream_prompts": None if chunk is None else 4}
        options = settings(folder, name, off_policy_correction="none", max_staleness=4, **stream)
        kills.finish(options, 1)
        ended = result(options)
        found.append((ended["model"], ended["samples.jsonl"]))
    return found[0] == found[1] and len(found[0][1]) == NUM_STEPS * 8


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_long_chunks_train_the_weights_of_the_run_without_streaming(tmp_path):
    assert run_multiprocess(run_both_forms, 1, timeout_seconds=500, args=(str(tmp_path),)) == [True]


def train(folder, *words):
    """Random models seldom end a turn and write no calls: here all do."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampling, "training_params", with_stops)
        call = ToolCall("mix", {"number": 3})
        patched.setattr(specs, "choose_parser", lambda *given: lambda *turn: [call])
        return main(
            [
                *("train", "--fsdp", "--pretrain", str(folder / "model"), "--no_bf16"),
                *("--prompt_data", str(folder / "rows.jsonl"), "--apply_chat_template"),
                *("--chat_template", str(folder / "template.jinja"), "--engine_type", "hf"),
                *("--environment", f"{folder / 'mixer.py'}:Mixer", "--environment_workers", "1"),
                *("--reward_fn", f"{folder / 'reward.py'}:score", "--max_turns", "3"),
                *("--rollout_batch_size", "4", "--n_samples_per_prompt", "2"),
                *("--train_batch_size", "8", "--micro_train_batch_size", "4"),
                *("--prompt_max_len", "64", "--generate_max_len", "10", "--max_steps", "4"),
                *("--init_kl_coef", "0", "--audit_every", "1", "--num_episodes", "3"),
                *("--stream_chunk", "5", "--max_staleness", "2"),
                *("--output_dir", str(folder / "out"), *words),
            ]
        )


@pytest.fixture
def folder(tmp_path):
    write_tiny_model(tmp_path / "model", "tiny-qwen3", seed=1)
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"input": f"say {'aeiou'[i % 5]}"}) for i in range(12))
    )
    (tmp_path / "mixer.py").write_text(episodes.ENVIRONMENT)
    (tmp_path / "template.jinja").write_text(episodes.TEMPLATE)
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


@pytest.mark.parametrize(
    "words", [(), ("--tool_lag", "1", "--stream_chunk", "10")], ids=["waited for", "late"]
)
def test_the_command_streams_episodes_and_its_steps_are_audited(folder, words):
    assert train(folder, *words) == ExitCode.OK
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").open()]
    assert len(rows) == 4
    assert max(row["staleness/max"] for row in rows) > 0
    assert all(row["episode/turns"] > 1 and row["reward/Mixer"] >= 0 for row in rows)
    assert rows[-1]["stream/open_groups"] == 0
    for step in range(1, 5):
        report = audit_step(folder / "out", step)
        assert [row for row in report.rows if row.verdict == DIFFERS] == []
    samples = [json.loads(line) for line in (folder / "out" / "samples.jsonl").open()]
    assert len(samples) == 4 * 8


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--late_join",), "stream_chunk excludes late_join"),
        (("--environment", "openenv:http://127.0.0.1:9"), "stream_chunk excludes environment open"),
    ],
)
def test_what_open_episodes_cannot_do_is_refused(folder, words, says, capsys):
    assert train(folder, *words) == ExitCode.USAGE
    assert says in capsys.readouterr().err

"""A run that is killed inside the episodes of an environment or agent ends as one that was not.

The journal says where an episode is: a run is killed once rank 0 of this process has written so
many events of a step, drawn at random, and the kill counts if episodes were under way. Compared are
every file of the last checkpoint, the exported model, metrics, samples, and all journals. Where a
random part of the episodes answers otherwise after the kill, those start over and the run ends;
it ends, too, where journals are damaged.
"""

import contextlib
import json
import random
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.machine import seconds
from tests.runs import TEMPLATE, calling, rollout_options
from tests.trainer import test_random_kills as kills

from lightrft.rollout.environments.calls import ToolCall

pytestmark = pytest.mark.shard("episode_kills")

NUM_STEPS = 3
# Answers follow from all that was said before.
ENVIRONMENT = '''
import asyncio
import os
import random
import time


class Mixer:
    def reset(self, seed: int = 0, **row):
        self.state = seed % 1009

    async def mix(self, number: int) -> str:
        """Mix a number in.

        Args:
            number: Any.
        """
        drawn = random.randrange(9)
        await asyncio.sleep(0.02)
        self.state = (self.state * 31 + number + drawn + random.randrange(9)) % 1009
        return str(self.state)

    def get_reward(self) -> float:
        return float(self.state % 5)


class Moody(Mixer):
    def reset(self, **row):
        super().reset(**row)
        self.state += os.urandom(1)[0] % 2

    def mix(self, number: int) -> str:
        """Mix a number in.

        Args:
            number: Any.
        """
        time.sleep(0.02)
        self.state = (self.state * 31 + number + 7) % 1009
        return str(self.state)
'''
# A function, and a program.
AGENT = """
import json
import os
import sys
import time
import urllib.request


def run(base_url, api_key, row):
    talk = list(row["prompt"])
    for number in range(3):
        headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
        body = json.dumps({"model": "policy", "messages": talk}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)["choices"][0]["message"]
        talk += [said, {"role": "user", "content": "more"}]
        if number and row["sample_seed"] % 2:
            talk[1] = {"role": "assistant", "content": "a branch"}
        time.sleep(0.02)
    return sum(map(ord, said["content"])) % 7 / 7


if __name__ == "__main__":
    with open(sys.argv[2]) as file:
        print(run(sys.argv[1], os.environ["OPENAI_API_KEY"], json.load(file)))
"""
CALLS = ExitStack()


def settings(folder, name, lag=0):
    return rollout_options(
        folder,
        name,
        reward_fn=(),
        rollout_lag=lag,
        environment=f"{folder / 'mixer.py'}:Mixer",
        apply_chat_template=True,
        chat_template=str(folder / "template.jinja"),
        environment_workers=1,
        max_turns=3,
        n_samples_per_prompt=2,
        micro_train_batch_size=4,
        generate_max_len=6,
        prompt_max_len=48,
        max_observation_tokens=16,
        max_steps=NUM_STEPS,
        save_steps=1,
        timeout_minutes=2.0,
        parity_check_steps=-1,
    )


def write_inputs(folder):
    kills.write_inputs(folder, num_rows=12)
    files = {"mixer.py": ENVIRONMENT, "agent.py": AGENT, "template.jinja": TEMPLATE}
    for name, text in files.items():
        (folder / name).write_text(text)


def let_random_models_call():
    """Let every turn call, with a number that follows from its text, until this process ends."""

    def call(text):
        return ToolCall("mix", {"number": sum(map(ord, text)) % 1009})

    CALLS.enter_context(calling(call))


def journal_of(options, step, rank, since=0):
    """Lines that were written after a time; a continued run writes beside the file it follows."""
    name = f"step-{step:06d}.rank-{rank}.jsonl"
    folder, found = Path(options["output_dir"]) / "journal", []
    for path in (folder / name, folder / f".{name}.partial"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime_ns > since:
                found.append(path.read_text(errors="replace").splitlines())
    return max(found, key=len, default=[])


def events(options, step, rank, since=0):
    found = []
    for line in journal_of(options, step, rank, since):
        try:
            found.append(json.loads(line))
        except ValueError:  # torn
            break
    return found


def is_inside(options, step, ranks, since):
    """Return whether episodes of some rank have begun and not ended."""
    seen = [events(options, step, rank, since) for rank in ranks]
    return any(count(own, "end") < count(own, "reset") for own in seen)


def count(found, name):
    """Of the episodes that have such an event; those of agents have one a call."""
    return len({e.get("episode", e["sample_id"]) for e in found if e["event"] == name})


def timeless_journal(options, world_size):
    found = []
    for step in range(1, NUM_STEPS + 1):
        for rank in range(world_size):
            own = [json.loads(line) for line in journal_of(options, step, rank)]
            for event in own:
                event.pop("weights_version", None)
                del event["check"]
                event.get("call", {}).pop("seconds", None)
            # Agents end in any order.
            own.sort(key=lambda event: (event.get("sample_id", -1), event["event"] == "end"))
            found.append(own)
    return found


def result(options, world_size):
    found = kills.result(options, models=("_actor",), num_steps=NUM_STEPS)
    found["journal"] = timeless_journal(options, world_size)
    return found


def kill_inside(options, world_size, lengths, dice, share, first=0.0):
    """Kills when the journal has a random number of events; what was killed, if inside.

    Args:
        share: Of the run, before which it is not killed.
        first: Of the events of a step, before which it is not.
    """
    folder = Path(options["output_dir"]) / "journal"
    begun = [int(path.name[5:11]) for path in folder.glob("step-*")]
    step = max(1 + int(NUM_STEPS * share), *begun, 1)
    length = lengths[step - 1]
    wanted, since = dice.randrange(max(2, int(first * length)), length), time.time_ns()
    ranks = kills.Ranks(options, world_size)
    limit = time.monotonic() + seconds(kills.RUN_SECONDS)
    while ranks.running() and len(journal_of(options, step, 0, since)) < wanted:
        assert time.monotonic() < limit, ranks.log.read_text()[-3000:]
        time.sleep(0.002)
    running = ranks.running()
    if len(running) < world_size:
        ranks.kill(running)
        return None
    chosen = dice.choice([running, running[:1], running[-1:]])
    ranks.kill(chosen)
    is_counted = is_inside(options, step, range(world_size), since)
    return f"step {step}, event {wanted}, {len(chosen)} killed" if is_counted else None


def killed_run(options, world_size, expected, lengths, num_kills, dice):
    """Kills one run again and again inside episodes, lets it end, and compares."""
    done, tries = [], 0
    shutil.rmtree(options["output_dir"], ignore_errors=True)
    while len(done) < num_kills:
        tries += 1
        assert tries < 6 * num_kills + 6, done
        share = len(done) / num_kills
        found = kill_inside(options, world_size, lengths, dice, share)
        if (Path(options["output_dir"]) / "summary.json").exists():
            shutil.rmtree(options["output_dir"])  # it had ended: from the beginning
            done = []
        elif found is not None:
            done.append(found)
    kills.finish(options, world_size)
    ended = result(options, world_size)
    kills.require_same_end(ended, expected, (world_size, done))
    assert all(row.get("episode/restarts", 0) == 0 for row in ended["metrics.jsonl"])
    return done


def kill_runs(folder, num_runs, chain, seed, form_of):
    """Kills every run `chain` times.

    Args:
        folder: Of all runs.
        num_runs: How many are killed.
        chain: How often.
        seed: Of all that is drawn.
        form_of: Function of the folder and a run's number: its ranks, lag and further options.
    """
    kills.become_launcher()
    folder, dice, num_kills = Path(folder), random.Random(seed), 0
    write_inputs(folder)
    let_random_models_call()
    whole = {}
    for number in range(num_runs):
        size, lag, changes = form_of(folder, number)
        form = "_".join((str(size), str(lag), *changes))
        if form not in whole:
            options = settings(folder, f"whole_{form}", lag) | changes
            kills.finish(options, size)
            kills.import_modules(Path(f"{options['output_dir']}.modules"))
            lengths = [len(journal_of(options, step, 0)) for step in range(1, NUM_STEPS + 1)]
            whole[form] = result(options, size), lengths
            if changes:
                assert all(row["agent/branches"] > 1 for row in whole[form][0]["metrics.jsonl"])
            else:
                assert all(count(events(options, s, 0), "answer") for s in range(1, NUM_STEPS + 1))
        options = settings(folder, f"killed_{form}", lag) | changes
        done = killed_run(options, size, *whole[form], num_kills=chain, dice=dice)
        num_kills += len(done)
        print(f"{num_kills} kills, last of {form}, after {done}", file=sys.stderr, flush=True)
    return num_kills


def form_of_environment(folder, number):
    """Two of four have episodes in flight between steps."""
    return 1 + number % 2, int(number % 4 in (0, 3)), {}


def form_of_agent(folder, number):
    """Of four, two are programs, and two have two ranks and episodes in flight between steps."""
    size, agent = 1 + number % 2, folder / "agent.py"
    if (number + number // 2) % 2:
        form = {"agent": f"{agent}:run"}
    else:
        form = {"agent_command": f"python3 {agent} {{base_url}} {{row}}"}
    return size, size - 1, {**form, "environment": None, "max_observation_tokens": 64}


def run_all(rank, world_size, *how):
    return kill_runs(*how, form_of_environment)


def run_agents(rank, world_size, *how):
    return kill_runs(*how, form_of_agent)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "num_runs, chain",
    [(2, 3), pytest.param(8, 4, marks=pytest.mark.slow)],
    ids=["6 kills", "32 kills"],
)
@pytest.mark.parametrize("kind", [run_all, run_agents], ids=["environments", "agents"])
def test_a_run_killed_inside_episodes_ends_as_one_that_nobody_killed(
    tmp_path, kind, num_runs, chain
):
    kills.kill_in_a_process(kind, tmp_path, num_runs, chain)


def damage_journals(options, dice):
    """Other bytes somewhere in each journal."""
    for path in (Path(options["output_dir"]) / "journal").glob("*step-*"):
        data = path.read_bytes()
        place = dice.randrange(len(data))
        path.write_bytes(data[:place] + dice.randbytes(3) + data[place + 3 :])


def run_moody(rank, world_size, folder, num_runs, chain, seed):
    """Kills every run once, where about half of its episodes will be answered otherwise."""
    kills.become_launcher()
    folder, dice, num_restarts = Path(folder), random.Random(seed), 0
    write_inputs(folder)
    let_random_models_call()
    whole = settings(folder, "whole")
    kills.finish(whole, 1)
    kills.import_modules(Path(f"{whole['output_dir']}.modules"))
    lengths = [len(journal_of(whole, step, 0)) for step in range(1, NUM_STEPS + 1)]
    for number in range(num_runs):
        size, options = 1 + number % 2, settings(folder, f"moody_{number}")
        options["environment"] = options["environment"].replace("Mixer", "Moody")
        # Of two ranks each has half of the episodes.
        own, share = [length // size for length in lengths], dice.random()
        while kill_inside(options, size, own, dice, share, first=0.5) is None:
            shutil.rmtree(options["output_dir"])
        if number % 4 in (1, 2):
            damage_journals(options, dice)
        kills.finish(options, size)
        rows = kills.timeless(Path(options["output_dir"]) / "metrics.jsonl")
        num_restarts += sum(row["episode/restarts"] for row in rows)
        print(f"{number + 1} ended, {num_restarts} restarts", file=sys.stderr, flush=True)
    assert num_restarts > 0
    return num_runs


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "num_runs", [2, pytest.param(20, marks=pytest.mark.slow)], ids=["2 kills", "20 kills"]
)
def test_a_killed_run_ends_where_a_part_of_its_episodes_is_answered_otherwise(tmp_path, num_runs):
    kills.kill_in_a_process(run_moody, tmp_path, num_runs, 1)

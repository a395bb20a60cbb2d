"""Ranks that only generate: every form equals the sequential one, `--rollout_lag`, bit for bit.

Ranks are forked from a process that has imported everything. Random delays are planted in every
phase of every rank: what is sampled and trained must not depend on them, nor on kills.
"""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests import machine
from tests.forked_run import Ranks
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.ranks import run_multiprocess
from tests.runs import TEMPLATE
from tests.trainer.test_killed_episodes import AGENT, ENVIRONMENT, let_random_models_call
from tests.trainer.test_random_kills import (
    become_launcher,
    finish,
    import_modules,
    kill_once,
    num_events,
    require_same_end,
    result,
    settings,
    write_inputs,
)
from tests.trainer.vision_world import write_data

from lightrft.config import TrainConfig
from lightrft.config.train_config import launch_problems
from lightrft.strategy.config import ConfigError

pytestmark = [pytest.mark.shard("overlap"), pytest.mark.timeout(3600)]

# What is delayed: commands, rows, sampling, rewards, training, syncs, checkpoints.
PHASES = {
    "lightrft.strategy.split.bridge": {"Bridge": ("send", "receive", "exchange_bytes")},
    "lightrft.strategy.engine.session": {"EngineSession": ("gather_and_generate",)},
    "lightrft.rollout.scoring": {"GroupScorer": ("results",)},
    "lightrft.stages.policy.updates": {"PolicyUpdate": ("train",)},
    "lightrft.strategy.weight_sync.sync": {"WeightSync": ("sync",)},
    "lightrft.run.loop": {"Loop": ("draw", "save_checkpoint")},
}
# Responses of a group are decoded together, so that their bits do not depend on other prompts.
WHOLE_GROUPS = {"engine_args": {"rows_at_once": "2"}}
ONE_ROW = {"engine_args": {"rows_at_once": "1"}}
EPISODES = {
    "reward_fn": (),
    "apply_chat_template": True,
    "chat_template": "template.jinja",
    "environment_workers": 1,
    "max_turns": 3,
    "max_observation_tokens": 16,
    "generate_max_len": 6,
    "prompt_max_len": 48,
}
MIXER = EPISODES | {"environment": "mixer.py:Mixer"}
AGENTS = EPISODES | {"agent": "agent.py:run", "max_observation_tokens": 64, **ONE_ROW}
IMAGES = {
    "pretrain": "seeing",
    "prompt_data": "images/train.jsonl",
    "input_key": "input",
    "eval_data": "images/train.jsonl",
    "apply_chat_template": True,
    "prompt_max_len": 400,
    "parity_check_steps": 0,
}
ADAPTERS = {"lora_rank": 2, "lora_sync": "adapter", "init_kl_coef": 0.05}
# Options whose values are files of a test.
FILES = {"environment", "agent", "chat_template", "pretrain", "prompt_data", "eval_data"}
CASES = {
    "lag 1, 1 + 1": (1, 1, {"eval_steps": 2}),
    "lag 1, 2 + 1": (2, 1, WHOLE_GROUPS | {"dynamic_sampling": True}),
    "streaming, 1 + 2": (1, 2, {"rollout_lag": 2, "stream_chunk": 2, **ONE_ROW}),
    # Padded rows share nothing, as ranks that only generate learn from the others.
    "lag 1, 2 + 2": (2, 2, {"shared_prefix": "auto"}),
    "prompts once, 1 + 1": (1, 1, {"packing_samples": True, "shared_prefix": "auto"}),
    "environment, 1 + 2": (1, 2, MIXER | ONE_ROW),
    "environment, streaming, 2 + 1": (2, 1, MIXER | ONE_ROW | {"stream_chunk": 4}),
    "environment, tool_lag, 1 + 1": (
        1,
        1,
        MIXER | {"stream_chunk": 6, "tool_lag": 1, "max_staleness": 3},
    ),
    "agents, 2 + 1": (2, 1, AGENTS),
    "adapters, 2 + 1": (2, 1, WHOLE_GROUPS | ADAPTERS),
    "adapters on 4 bits, 1 + 2": (1, 2, ONE_ROW | ADAPTERS | {"quantize": "nf4"}),
    "images, 1 + 1": (1, 1, IMAGES | {"eval_steps": 2}),
    "images, streaming, 2 + 1": (2, 1, IMAGES | ONE_ROW | {"stream_chunk": 2}),
}


def plant_delays(seed, longest, rank):
    """Every phase of this process begins late, by chance."""
    import importlib

    dice = random.Random(1000 * seed + rank)

    def late(function):
        def delayed(*arguments, **named):
            time.sleep(dice.uniform(0, longest))
            return function(*arguments, **named)

        return delayed

    for module, classes in PHASES.items():
        for name, methods in classes.items():
            kind = getattr(importlib.import_module(module), name)
            for method in methods:
                setattr(kind, method, late(getattr(kind, method)))


def options_of(folder, name, **changes):
    found = settings(folder, "fsdp", name)
    del found["critic_pretrain"]
    changes |= {name: str(folder / changes[name]) for name in FILES & changes.keys()}
    return found | {
        "advantage_estimator": "group_norm",
        "rollout_lag": 1,
        "rollout_batch_size": 4,
        "train_batch_size": 4,
        "num_episodes": 20,
        "eval_data": str(folder / "train.jsonl"),
        "reward_running_norm": True,
        **changes,
    }


def ended(options, num_ranks, *, same_ranks=False):
    """What a run has come to; what names its ranks only if the other one has as many."""
    logs = ("metrics.jsonl", "samples.jsonl") if same_ranks else ("metrics.jsonl",)
    found = result(options, ("_actor",), logs=logs)
    return found if same_ranks else {k: v for k, v in found.items() if "client_state" not in str(k)}


def compare(folder, case, *, seeds, longest):
    """The sequential form, and the split one under each schedule."""
    num_training, num_generating, changes = CASES[case]
    one_each = num_training == num_generating
    calls = (lambda rank: let_random_models_call()) if "max_turns" in changes else None
    name = case.replace(" ", "").replace(",", "_").replace("+", "x")
    sequential = options_of(folder, f"{name}_sequential", **changes)
    finish(sequential, num_training, calls)
    expected = ended(sequential, num_training, same_ranks=one_each)
    for seed in seeds:
        split = options_of(folder, f"{name}_{seed}", rollout_ranks=num_generating, **changes)

        def prepare(rank, seed=seed):
            if calls is not None:
                calls(rank)
            plant_delays(seed, longest, rank)

        finish(split, num_training + num_generating, prepare)
        found = ended(split, num_training, same_ranks=one_each)
        require_same_end(found, expected, (case, seed))
    return len(seeds)


def prepared(folder):
    become_launcher()
    folder = Path(folder)
    write_inputs(folder, 16)
    write_tiny_vision_model(folder / "seeing", "tiny-qwen2.5-vl", seed=1)
    (folder / "images").mkdir()
    write_data(folder / "images")
    (folder / "mixer.py").write_text(ENVIRONMENT)
    (folder / "agent.py").write_text(AGENT)
    (folder / "template.jinja").write_text(TEMPLATE)
    first = options_of(folder, "first", rollout_ranks=1)
    finish(first)
    import_modules(Path(f"{first['output_dir']}.modules"))
    return folder


def compare_all(rank, world_size, folder, num_schedules, longest, cases=CASES):
    folder = prepared(folder)
    return sum(compare(folder, case, seeds=range(num_schedules), longest=longest) for case in cases)


@pytest.mark.full
@pytest.mark.parametrize(
    "num_schedules, longest",
    [(1, 0.02), pytest.param(10, 0.3, marks=pytest.mark.slow)],
    ids=["10 schedules", "100 schedules"],
)
def test_any_split_under_any_delays_is_the_sequential_run(tmp_path, num_schedules, longest):
    done = run_multiprocess(
        compare_all, 1, timeout_seconds=3500, args=(str(tmp_path), num_schedules, longest)
    )
    assert done == [len(CASES) * num_schedules]
    first = Path(options_of(tmp_path, "first", rollout_ranks=1)["output_dir"])
    logs = [(first / "logs" / f"timeline_{rank}.jsonl").read_text() for rank in (0, 1)]
    training, generating = ({json.loads(x)["name"] for x in text.splitlines()} for text in logs)
    assert training >= {"wait", "train", "weight_sync"}
    assert "rollout" in generating - training


def kill_all(rank, world_size, folder, num_kills, seed):
    """Kills runs of several forms; each ends as the one nobody killed."""
    folder, dice, num_done = prepared(folder), random.Random(seed), 0
    forms = {
        "split": {"rollout_ranks": 1},
        "streaming": {"rollout_lag": 0, "stream_chunk": 2},
        "images": IMAGES | {"rollout_ranks": 1, "stream_chunk": 2},
        "environment": MIXER,
        "open episodes": MIXER | {"stream_chunk": 4, "tool_lag": 1, "max_staleness": 4},
        "agents": AGENTS | {"rollout_ranks": 1},
    }
    for form, changes in forms.items():
        if "max_turns" in changes:
            let_random_models_call()
        whole = options_of(folder, f"{form}_whole", **changes)
        finish(whole)
        expected, events = result(whole, ("_actor",)), num_events(whole)
        killed, done = options_of(folder, f"{form}_killed", **changes), []
        while len(done) < num_kills // len(forms):
            found = kill_once(killed, events, dice)
            if found is None:
                os.rename(killed["output_dir"], f"{killed['output_dir']}_{num_done}_{len(done)}")
            done = [] if found is None else [*done, found]
        finish(killed)
        require_same_end(result(killed, ("_actor",)), expected, (form, done, seed))
        num_done += len(done)
    return num_done


@pytest.mark.full
@pytest.mark.parametrize(
    "num_kills", [6, pytest.param(60, marks=pytest.mark.slow)], ids=["6 kills", "60 kills"]
)
def test_a_run_with_rows_in_flight_that_is_killed_ends_as_the_one_nobody_killed(
    tmp_path, num_kills
):
    seed = random.randrange(2**32)
    done = run_multiprocess(
        kill_all, 1, timeout_seconds=3500, args=(str(tmp_path), num_kills, seed)
    )
    assert done == [num_kills], seed


def wait_for_a_step(ranks, options):
    lines = Path(options["output_dir"]) / "metrics.jsonl"
    limit = time.monotonic() + machine.seconds(60)
    while not lines.exists() and ranks.running():
        assert time.monotonic() < limit
        time.sleep(0.01)


def lose(rank, world_size, folder):
    """What the survivors say, by which rank was lost and how."""
    folder, told = prepared(folder), {}
    for how, lost in (("KILL", 1), ("KILL", 0), ("STOP", 1), ("STOP", 0)):
        minutes = 2.0 if how == "KILL" else 0.2
        options = options_of(
            folder, f"{how}{lost}", rollout_ranks=1, max_steps=400, timeout_minutes=minutes
        )
        ranks = Ranks(options, 2)
        wait_for_a_step(ranks, options)
        children = list(ranks.codes)
        os.kill(children[lost], signal.SIGKILL if how == "KILL" else signal.SIGSTOP)
        limit = time.monotonic() + machine.seconds(40)
        while children[1 - lost] in ranks.running() and time.monotonic() < limit:
            time.sleep(0.01)
        survivor = ranks.codes[children[1 - lost]]
        for child in ranks.running():
            os.kill(child, signal.SIGKILL)
        ranks.wait(10)
        told[how, lost] = survivor, ranks.log.read_text()
    return told


@pytest.mark.full
def test_a_lost_rank_of_either_side_ends_the_other_which_names_it(tmp_path):
    (told,) = run_multiprocess(lose, 1, timeout_seconds=600, args=(str(tmp_path),))
    for (how, lost), (code, text) in told.items():
        assert code == (7 if how == "STOP" else 1), (how, lost, text[-2000:])
        if how == "STOP":
            role = "generates" if lost else "trains"
            assert f"no sign of life for 12 s: rank {lost}, which {role}" in text, text[-2000:]
        else:
            assert f"lost the ranks that {'generate' if lost else 'train'}" in text, text[-2000:]


REFUSED = {
    "rollout_lag 1": {"rollout_lag": 0},
    "reward_pretrain": {"reward_pretrain": ("model",)},
    "teacher": {"teacher": "model"},
    "audit_every": {"audit_every": 1},
    "FSDP2": {"fsdp": False},
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_ranks_that_generate_cannot_do_is_refused_in_a_line(text):
    with pytest.raises(ConfigError, match=text):
        TrainConfig(**{"rollout_ranks": 1, "rollout_lag": 1, "fsdp": True, **REFUSED[text]})


def test_each_side_has_to_fit_the_batches():
    config = TrainConfig(
        rollout_ranks=2, rollout_lag=1, rollout_batch_size=4, n_samples_per_prompt=2,
        train_batch_size=8, micro_train_batch_size=4, fsdp=True,
    )  # fmt: skip
    assert launch_problems(config, 4) == []
    assert launch_problems(config, 3) == []
    assert "leaves no process to train" in launch_problems(config, 2)[0]
    assert "multiple of the 3 processes" in launch_problems(config, 5)[0]
    three = config.replaced({"rollout_ranks": 3})
    assert "multiple of rollout_ranks: got 4 and 3" in launch_problems(three, 4)[0]

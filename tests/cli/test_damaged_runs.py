"""The same command continues a run of whose checkpoints some are damaged, to the same end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.programs import run_python
from tests.ranks import run_multiprocess

from lightrft.config.files import FileEntry, sealed
from lightrft.tools.model_presets import write_tiny_model

pytestmark = pytest.mark.shard("damage")

REWARD = "def score(responses):\n    return [float(sum(map(ord, r)) % 3) for r in responses]\n"
ACTOR, CRITIC = "_actor/global_step2", "_critic/global_step2"
ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def forge_state(folder):
    """A state that is no trainer's, in a manifest that vouches for it."""
    (folder / "client_state.json").write_text("{}")
    values = json.loads((folder / "manifest.json").read_text())
    entry = next(e for e in values["files"] if e["path"] == "client_state.json")
    entry |= asdict(FileEntry.of(folder, "client_state.json"))
    (folder / "manifest.json").write_text(sealed(values))


def lose_manifests(checkpoints):
    for path in checkpoints.rglob("manifest.json"):
        path.unlink()


# Name -> (what happens to the folder of checkpoints, exit code, what is printed).
CASES = {
    "critic flipped": (
        lambda c: flip(c / CRITIC / "model" / "rank_00000.safetensors"),
        0,
        "after step 1",
    ),
    "oldest manifest no text": (
        lambda c: (c / "_actor/global_step1/manifest.json").write_bytes(b"\xff\xfe"),
        0,
        "after step 2",
    ),
    "newest manifest deep": (
        lambda c: (c / ACTOR / "manifest.json").write_text("[" * 100_000),
        0,
        "after step 1",
    ),
    "critic manifest lost": (lambda c: (c / CRITIC / "manifest.json").unlink(), 0, "after step 1"),
    "optimizer cut": (
        lambda c: os.truncate(c / ACTOR / "optimizer" / "rank_00000.safetensors", 100),
        0,
        "after step 1",
    ),
    "pointer no text": (lambda c: (c / "_actor/latest").write_bytes(b"\xff"), 0, "after step 2"),
    "state of nobody": (lambda c: forge_state(c / ACTOR), 0, "after step 1"),
    "generators swapped": (
        lambda c: shutil.copy(c / CRITIC / "scheduler.json", c / ACTOR / "rng/rank_00000.json"),
        0,
        "after step 1",
    ),
    "critic gone": (lambda c: shutil.rmtree(c / CRITIC), 0, "after step 1"),
    "actor gone": (
        lambda c: shutil.rmtree(c / "_actor"),
        2,
        "_actor/global_step2 is missing or damaged",
    ),
    "all manifests lost": (lose_manifests, 2, "manifest.json: is missing"),
    "both steps flipped": (
        lambda c: [flip(p) for p in c.rglob("client_state.json")],
        2,
        "does not match its SHA-256",
    ),
}
DEFAULT = ("critic flipped", "all manifests lost")


def arguments(folder, run):
    return [
        "train",
        "--pretrain",
        str(folder / "model"),
        "--critic_pretrain",
        str(folder / "model"),
        "--prompt_data",
        str(folder / "train.jsonl"),
        "--reward_fn",
        f"{folder / 'reward.py'}:score",
        "--advantage_estimator",
        "gae",
        "--engine_type",
        "hf",
        "--fsdp",
        "--rollout_batch_size",
        "2",
        "--n_samples_per_prompt",
        "2",
        "--train_batch_size",
        "4",
        "--micro_train_batch_size",
        "4",
        "--generate_max_len",
        "4",
        "--prompt_max_len",
        "32",
        "--init_kl_coef",
        "0",
        "--save_steps",
        "1",
        "--max_steps",
        "3",
        "--actor_learning_rate",
        "1e-3",
        "--output_dir",
        str(run),
    ]


def called(words):
    """Exit code, output and messages of the command as a function."""
    from lightrft.cli.main import main

    output, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
        code = main(words)
    return code, output.getvalue(), messages.getvalue()


def started(words):
    """The same of the command as a process."""
    environment = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
    done = run_python("-m", "lightrft.cli.main", *words, timeout_seconds=240, env=environment)
    return done.returncode, done.stdout, done.stderr


def ending(run):
    """The last checkpoints file by file, and the exported model."""
    found = {"model": (run / "model" / "model.safetensors").read_bytes()}
    for name in ("_actor", "_critic"):
        manifest = json.loads((run / f"checkpoints/{name}/global_step3/manifest.json").read_text())
        found |= {(name, entry["path"]): entry["sha256"] for entry in manifest["files"]}
    return found


def as_if_killed(run):
    """Leaves what a kill in the third step would."""
    (run / "summary.json").unlink()
    shutil.rmtree(run / "model")
    for model in ("_actor", "_critic"):
        shutil.rmtree(run / "checkpoints" / model / "global_step3")


def run_cases(rank, world_size, folder, names, *, as_process):
    """What every case came to; asserted here, in a process that has imported everything."""
    folder, execute = Path(folder), started if as_process else called
    code, output, messages = execute(arguments(folder, folder / "whole"))
    assert code == 0, messages
    expected = ending(folder / "whole")
    for name in names:
        change, code, text = CASES[name]
        run = Path(shutil.copytree(folder / "whole", folder / name.replace(" ", "_")))
        as_if_killed(run)
        config = (run / "config.toml").read_text().replace(str(folder / "whole"), str(run))
        (run / "config.toml").write_text(config)
        change(run / "checkpoints")
        found, output, messages = execute(arguments(folder, run))
        assert found == code, (name, output, messages)
        if code == 0:
            assert text in output, (name, output)
            ended = ending(run)
            assert ended.keys() == expected.keys(), name
            assert [key for key in expected if ended[key] != expected[key]] == [], name
        else:
            (line,) = messages.splitlines()[-1:]
            assert text in line, (name, messages)
            assert "Traceback" not in messages
    return len(names)


def flip_bytes(rank, world_size, folder, num_flips, num_inner):
    """Flips a byte of each file of a killed run, and starts it again; returns the files.

    Args:
        num_flips: Of each file, one after the other.
        num_inner: Files of checkpoints, which a hash protects; None is all.
    """
    folder, draw = Path(folder), random.Random(7)
    run, template, words = folder / "run", folder / "killed", arguments(folder, folder / "run")
    code, _, messages = called(words)
    assert code == 0, messages
    expected = ending(run)
    as_if_killed(run)
    run.rename(template)
    files = sorted(path for path in template.rglob("*") if path.is_file() and path.stat().st_size)
    files = [path.relative_to(template) for path in files]
    inner = [path for path in files if path.parts[0] == "checkpoints"]
    if num_inner is not None:
        files = [path for path in files if path not in inner] + draw.sample(inner, num_inner)
    for path in (path for path in files for _ in range(num_flips)):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(template, run)
        content = bytearray((run / path).read_bytes())
        place, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
        content[place] ^= bit
        (run / path).write_bytes(content)
        code, _, messages = called(words)
        case = (str(path), place, bit, code, messages[-3000:])
        assert "Traceback" not in messages, case
        if code == 0:
            ended = ending(run)
            other = [key for key in expected if ended[key] != expected[key]]
            assert other == [], (other, case)
        else:
            assert path.name in messages, case
    return {str(path) for path in files}


def run_called(rank, world_size, folder, names):
    return run_cases(rank, world_size, folder, names, as_process=False)


@pytest.fixture
def folder(tmp_path):
    write_tiny_model(tmp_path / "model", "tiny-qwen3", seed=1)
    rows = [json.dumps({"input": f"say {'aeiou'[i % 5] * 3}"}) for i in range(6)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


@pytest.mark.full
@pytest.mark.multiprocess
def test_two_damaged_runs_are_continued_or_named(folder):
    assert run_multiprocess(run_called, 1, timeout_seconds=240, args=(str(folder), DEFAULT)) == [2]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
def test_every_damaged_run_is_continued_or_named(folder):
    assert run_cases(0, 1, str(folder), tuple(CASES), as_process=True) == 12


@pytest.mark.full
@pytest.mark.multiprocess
def test_a_flipped_byte_of_a_run_is_passed_over_or_its_file_is_named(folder):
    arguments = (str(folder), 1, 1)
    (files,) = run_multiprocess(flip_bytes, 1, timeout_seconds=240, args=arguments)
    outer = {name for name in files if not name.startswith("checkpoints")}
    assert outer == {
        ".lock",
        "config.toml",
        "events.jsonl",
        "logs/rank_0.log",
        "logs/timeline_0.jsonl",
        "metrics.jsonl",
        "run.json",
        "samples.jsonl",
    }


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(3000)
def test_flipped_bytes_of_every_file_of_a_run(folder):
    arguments = (str(folder), 3, None)
    run_multiprocess(flip_bytes, 1, timeout_seconds=2700, args=arguments)

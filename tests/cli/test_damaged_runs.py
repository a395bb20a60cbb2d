"""The same command continues a run of whose files some are damaged, to the same end.

Which step is continued of damaged checkpoints: `tests/trainer/test_damaged_checkpoints.py`.
"""

import contextlib
import io
import json
import random
import shutil
from pathlib import Path

import pytest
from tests.ranks import run_multiprocess
from tests.runs import FEW, rollout_options, say_rows, tiny_models, words, write_inputs

from lightrft.cli.main import main

pytestmark = pytest.mark.shard("damage")


def arguments(folder):
    critic = {"critic_pretrain": folder / "model", "advantage_estimator": "gae"}
    steps = {"max_steps": 3, "save_steps": 1, "generate_max_len": 4}
    return ["train", *words(rollout_options(folder, **FEW, **critic, **steps))]


def called(line):
    """Return exit code and messages of a command line."""
    messages = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(messages):
        return main(line), messages.getvalue()


def ending(run):
    """Return the hashes of the last checkpoints by file, and the exported model."""
    files = {"model": (run / "model/model.safetensors").read_bytes()}
    for name in ("_actor", "_critic"):
        manifest = json.loads((run / f"checkpoints/{name}/global_step3/manifest.json").read_text())
        files |= {(name, entry["path"]): entry["sha256"] for entry in manifest["files"]}
    return files


def as_if_killed(run):
    """Leave what a kill in the third step would."""
    (run / "summary.json").unlink()
    shutil.rmtree(run / "model")
    for model in ("_actor", "_critic"):
        shutil.rmtree(run / "checkpoints" / model / "global_step3")


def flip_bytes(rank, world_size, folder, num_flips, num_inner):
    """Flip a byte of each file of a killed run, and start it again; return the files.

    Args:
        num_flips: Of each file, one after the other.
        num_inner: Files of checkpoints, which a hash protects; None is all.
    """
    folder, draw = Path(folder), random.Random(7)
    run, template, line = folder / "run", folder / "killed", arguments(folder)
    code, messages = called(line)
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
        code, messages = called(line)
        case = (str(path), place, bit, code, messages[-3000:])
        assert "Traceback" not in messages, case
        assert ending(run) == expected if code == 0 else path.name in messages, case
    shutil.rmtree(run)
    shutil.copytree(template, run)
    shutil.rmtree(run / "checkpoints/_actor")
    code, messages = called(line)
    assert code == 2
    assert "_actor/global_step2 is missing or damaged" in messages.splitlines()[-1]
    return {str(path) for path in files}


@pytest.fixture
def folder(tmp_path):
    return write_inputs(tiny_models(tmp_path, "model"), say_rows(6))


@pytest.mark.full
def test_a_flipped_byte_of_a_run_is_passed_over_or_its_file_is_named(folder):
    arguments = (str(folder), 1, 1)
    (files,) = run_multiprocess(flip_bytes, 1, timeout_seconds=240, args=arguments)
    outer = {name for name in files if not name.startswith("checkpoints")}
    assert outer == {
        ".lock",
        "config.toml",
        "draws.jsonl",
        "events.jsonl",
        "logs/rank_0.log",
        "logs/timeline_0.jsonl",
        "metrics.jsonl",
        "run.json",
        "samples.jsonl",
    }


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_flipped_bytes_of_every_file_of_a_run(folder):
    run_multiprocess(flip_bytes, 1, timeout_seconds=2700, args=(str(folder), 3, None))

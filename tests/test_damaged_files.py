"""Every reader of files takes what is damaged in one line of its documented error, or reads it.

The readers are the rows of `READERS`. Each is given mutations of a valid file in a process of its
own, whose memory is limited.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.machine import seconds
from tests.ranks import run_multiprocess
from tests.rollout.journal_edits import lines_of

# Of the shard, 3,000 a reader; by default few.
EXAMPLES = int(os.environ.get("LIGHTRFT_FUZZ_EXAMPLES", "0")) * 3 // 2 or 40
MEMORY_BYTES, SECONDS = 2**30, 10.0
pytestmark = [pytest.mark.shard("fuzz_files"), pytest.mark.timeout(300 + 2 * EXAMPLES)]
TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Reader:
    """What reads a folder.

    Args:
        files: That are damaged, below it.
        make: Writes valid ones into it.
        read: Reads it.
        error: Class of what it may raise; a list as MODULE:NAME.
        seal: Makes checksums true again after the content of a file was changed.
    """

    files: tuple[str, ...]
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    errors: tuple[str, ...] = ()
    code: int = 2
    seal: Callable[[Path], object] | None = None


def helper(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- valid files and their readers ----


def make_audited(folder):
    world = helper(TESTS / "tools/audit/world.py")
    model = world.write_model(folder / "model")
    world.record_step(model, folder / "run", {"advantage_estimator": "gae", "init_kl_coef": 0.1})


def seal_record(folder):
    """The hashes of a damaged record made true again, where that is possible."""
    from lightrft.tools.audit.record import FACTS, seal

    path = folder / RECORD
    try:
        facts = json.loads((path / FACTS).read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(facts, dict):
        seal(path, facts)


def audit(folder):
    from lightrft.tools.audit.report import as_table, audit_step

    return as_table(audit_step(folder / "run"))


RECORD = "run/audit/step_000001/"


JOURNAL_HEADER = {
    "step": 1,
    "batch": 0,
    "rank": 0,
    "world_size": 1,
    "weights": 3,
    "sampling": [42, 1.0, 1.0, -1],
    "environment": {"schemas": [], "answers_turns": False},
}


def make_journal(folder):
    from lightrft.rollout.environments.journal_lines import FORMAT

    (folder / "journal").mkdir()
    turn = {"request_id": 5, "text": "a", "context_hash": "ab", "token_ids": [4, 5]}
    turn |= {"logprobs": [-0.5, -0.25], "logprobs_mode": "temperature", "finish_reason": "stop"}
    events = [
        {"event": "begin", "format": FORMAT, **JOURNAL_HEADER},
        {"event": "reset", "sample_id": 0, "told": None, "prompt_token_ids": [1, 2]},
        {"event": "turn", "sample_id": 0, "turn": 0, **turn, "weights_version": 1},
        {"event": "round", "round": 0, "sample_ids": [0]},
        {"event": "observation", "sample_id": 0, "turn": 0, "token_ids": [3], "text_spans": []},
        {"event": "end", "sample_id": 0, "reward": 1.0, "failure": None},
    ]
    (folder / "journal/step-000001.rank-0.jsonl").write_text(lines_of(events))


def seal_journal(folder):
    """The checksums of a damaged journal made true again."""
    path, lines, check = folder / "journal/step-000001.rank-0.jsonl", [], 0
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        text = line.rpartition(b', "check": ')[0]
        check = zlib.crc32(text, check)
        lines.append(text + b', "check": "%08x"}\n' % check)
    if lines:
        path.write_bytes(b"".join(lines))


def replay(folder):
    from lightrft.config import TrainConfig
    from lightrft.tools.replay.run_replay import read_step

    return read_step(folder, None, TrainConfig())


def make_gguf(folder):
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(folder / "m.gguf"), "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_token_list(["a", "bc", "d"])
    writer.add_token_scores([0.5, 1.0, 2.0])
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(folder):
    from examples.smollm2.from_gguf import read_fields

    return read_fields(folder / "m.gguf")


def make_model(folder):
    from lightrft.tools.model_presets import write_tiny_model

    write_tiny_model(folder / "m", "tiny-qwen3", seed=1)


def plan_size(folder):
    from lightrft.tools.plan.setup import read_model_size

    return read_model_size(str(folder / "m")).parameters


def load_config(folder):
    from lightrft.models.loading import load_config as load

    return load(str(folder / "m"))


def load_tokenizer(folder):
    from lightrft.models import load_tokenizer as load

    return load(str(folder / "m"))("hello 12")


def count_weights(folder):
    from lightrft.models.weight_files import count_model

    return count_model(str(folder / "m"))


def make_checkpoint(folder):
    import torch

    from lightrft.strategy.checkpoints import folders
    from lightrft.strategy.checkpoints.client_state import save_state
    from lightrft.strategy.checkpoints.files import FileWriter

    path = folder / "global_step1"
    path.mkdir()
    state = {"a": torch.ones(3), "b": (1, 2.5, None), "c": {"d": [True, "x"]}}
    save_state(path / "client_state", state, FileWriter())
    from lightrft.strategy.checkpoints.manifest import Manifest

    entries = tuple(
        folders._flush_and_hash(path, name)
        for name in ("client_state.json", "client_state.safetensors")
    )
    manifest = Manifest("global_step1", 1, "fsdp2", 1, files=entries)
    (path / "manifest.json").write_text(manifest.to_json())


def scan(folder):
    from lightrft.strategy.checkpoints.manifest import scan_checkpoints

    return scan_checkpoints(folder)


def read_state(folder):
    from lightrft.strategy.checkpoints.client_state import load_state

    return load_state(folder / "global_step1/client_state")


def make_config(folder):
    from lightrft.config import TrainConfig

    TrainConfig(pretrain="m", policy_loss_args={"a": 1.0}).save(folder / "config.toml")


def read_config(folder):
    from lightrft.config import TrainConfig

    return TrainConfig.load(folder / "config.toml")


def make_run(folder):
    make_config(folder)
    lines = [{"step": i, "reward": 0.5 * i, "kl": 0.1, "engine_hash": 2**60 + i} for i in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens = {"tokens": ["a", "b"], "token_ids": [1, 2], "logprobs": [-0.5, -1.0]}
    sample = {"step": 1, "prompt": "p", "response": "r", "reward": 1.0, "group_id": 0, **tokens}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    event = {"unix_seconds": 1.7e9, "event": "started", "step": 0, "world_size": 1}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    start = {"started_unix": 1.7e9, "world_size": 1, "versions": {"torch": "2"}}
    (folder / "run.json").write_text(json.dumps(start))
    (folder / "summary.json").write_text(json.dumps({"num_steps": 2, "world_size": 1}))


def report(folder):
    from lightrft.tools.report.page import render_report

    page = render_report(folder)
    found = re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", page)
    assert found is None, f"the page holds {found[0]!r}"
    page.encode()


def make_rows(folder):
    import pyarrow as arrow
    from pyarrow import parquet

    rows = [{"input": f"say {i}", "label": str(i)} for i in range(3)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "d.json").write_text(json.dumps(rows))
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "d.parquet")


def read_rows(name):
    def read(folder):
        from lightrft.datasets.files import read_rows

        return read_rows(folder / name)

    return read


def make_recipe(folder):
    (folder / "recipe.toml").write_text("[math]\na = 1.0\n[chat]\nb = 0.5\n")


def read_recipe(folder):
    from lightrft.rewards.build import load_recipes

    return load_recipes(folder / "recipe.toml", column="kind", names=["a", "b"])


def make_carried(folder):
    from lightrft.rollout.in_flight import to_bytes
    from lightrft.rollout.source import InFlight

    (folder / "state.json").write_bytes(to_bytes(InFlight(), 0))


def read_carried(folder):
    from lightrft.config.files import read_bytes
    from lightrft.rollout.in_flight import from_parts

    return from_parts([read_bytes(folder / "state.json")], 0, rank=0, world_size=1)


CONFIG, LOADING = "lightrft.config.options:ConfigError", "lightrft.models.loading:ModelLoadError"
FILE = "lightrft.config.files:FileError"
RECORD_ERRORS = ("lightrft.tools.audit.record:RecordError", CONFIG, FILE)
READERS = {
    "facts": Reader((RECORD + "facts.json",), make_audited, audit, RECORD_ERRORS, 2, seal_record),
    "arrays": Reader(
        (RECORD + "samples.safetensors", RECORD + "values.safetensors"),
        make_audited,
        audit,
        RECORD_ERRORS,
        seal=seal_record,
    ),
    "states": Reader(
        (RECORD + "before/actor/config.json", RECORD + "before/actor/state_00000.safetensors"),
        make_audited,
        audit,
        RECORD_ERRORS,
        seal=seal_record,
    ),
    "journal": Reader(
        ("journal/step-000001.rank-0.jsonl",),
        make_journal,
        replay,
        ("lightrft.tools.report.run_data:NotARunError",),
        seal=seal_journal,
    ),
    "gguf": Reader(("m.gguf",), make_gguf, read_gguf, (LOADING,)),
    "plan": Reader(("m/config.json",), make_model, plan_size, (CONFIG, FILE)),
    "model config": Reader(("m/config.json",), make_model, load_config, (LOADING,)),
    "tokenizer": Reader(
        ("m/tokenizer.json", "m/tokenizer_config.json"), make_model, load_tokenizer, (LOADING,)
    ),
    "weights": Reader(("m/model.safetensors",), make_model, count_weights),
    "manifest": Reader(("global_step1/manifest.json",), make_checkpoint, scan),
    "client state": Reader(
        ("global_step1/client_state.json", "global_step1/client_state.safetensors"),
        make_checkpoint,
        read_state,
        ("lightrft.strategy.checkpoints.errors:CheckpointError",),
    ),
    "options": Reader(("config.toml",), make_config, read_config, (CONFIG, FILE)),
    "report": Reader(
        (
            "metrics.jsonl",
            "samples.jsonl",
            "events.jsonl",
            "run.json",
            "summary.json",
            "config.toml",
        ),
        make_run,
        report,
    ),
    **{
        name: Reader((name,), make_rows, read_rows(name), ("lightrft.datasets.types:DataError",), 4)
        for name in ("d.jsonl", "d.json", "d.parquet")
    },
    "recipe": Reader(("recipe.toml",), make_recipe, read_recipe, (CONFIG, FILE)),
    "carried": Reader(("state.json",), make_carried, read_carried, ("builtins:ValueError",), 1),
}


# ---- mutations ----

HOSTILE = [
    None, True, [], {}, "", "x", "../../etc", "a\0b", "\x1b[2J", "\ud800", 0, -1, 1.5, 2**31, 2**63,
    10**30, 1e308, float("nan"), float("inf"), -float("inf"), [[]], [None], ["x"], {"x": 1}, "²",
    "9" * 5000, "x" * 10**5, {"auto_map": {"AutoConfig": "m.C"}},
]  # fmt: skip
DEEP = ("[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900)


def mutate_bytes(draw, content):
    content = bytearray(content)
    place = draw.randrange(len(content)) if content else 0
    kind = draw.randrange(9)
    if kind == 0:
        for _ in range(draw.choice((1, 1, 3, 20))):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del content[place:]
    elif kind == 2:
        content[place:place] = draw.randbytes(draw.choice((1, 3, 50)))
    elif kind == 3:
        del content[place : place + draw.choice((1, 4, 40))]
    elif kind == 4:
        content[place:place] = content[place : place + draw.choice((1, 8, 200))]
    elif kind == 5:
        content[place:place] = draw.choice((b"\xff\xfe", b"\x00", b"\xed\xa0\x80", b"\x1b[2J"))
    elif kind == 6:
        content[place : place + 8] = draw.choice((2**60, 2**63 - 1, 2**32, 0)).to_bytes(8, "little")
    elif kind == 7:
        return draw.choice((b"", *(deep.encode() for deep in DEEP), b"\n\n", b"[]", b"{}", b"7"))
    else:
        numbers = [m.span() for m in re.finditer(rb"-?\d+(\.\d+)?", bytes(content))]
        if numbers:
            start, stop = draw.choice(numbers)
            content[start:stop] = draw.choice(
                (b"NaN", b"-1", b"9" * 5000, b"1e999", b"null", b"12345678901234567890", b'"7"')
            )
    return bytes(content)


def _places(value, at=()):
    yield at
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in list(items)[:50]:
        yield from _places(item, (*at, key))


def mutate_json(draw, text):
    """Another value, no value, or one more at some place."""
    value = json.loads(text)
    *path, last = draw.choice([p for p in _places(value) if p] or [(None,)])
    if last is None:
        return json.dumps(draw.choice(HOSTILE))
    parent = value
    for key in path:
        parent = parent[key]
    kind, odd = draw.randrange(6), draw.choice(HOSTILE)
    if kind < 3:
        parent[last] = odd
    elif kind == 3:
        del parent[last]
    elif isinstance(parent, dict):
        parent[draw.choice(("x", "../../../etc", "²", "", "auto_map", "sha256"))] = odd
    else:
        parent[last:last] = [parent[last]] * draw.choice((1, 30))
    made = json.dumps(value)
    if kind == 5 and isinstance(parent, dict):
        made = made.replace("{", '{"step": 3, "step": [],', 1)
    return made


def mutate_arrays(draw, path):
    """Other numbers, shapes, types or names in a safetensors file."""
    from safetensors.torch import load_file, save_file

    arrays = load_file(path)
    name = draw.choice(sorted(arrays))
    array, kind = arrays.pop(name), draw.randrange(7)
    if kind == 0:
        arrays[name] = array[: len(array) // 2].clone() if array.dim() else array
    elif kind == 1:
        arrays[name] = -array if array.dtype.is_signed else ~array
    elif kind == 2:
        arrays[name] = array.double() if array.dtype.itemsize < 8 else array.float()
    elif kind == 3:
        arrays[name] = array[None].clone()
    elif kind == 4:
        arrays[draw.choice(("x", "update/²/new", "fact/../x", "weight/x"))] = array
    elif kind == 5:
        arrays[name] = array * draw.choice((10**6, 0))
    save_file(arrays, path)


def mutate(draw, path, has_seal):
    """Damages a file; True if checksums shall be made true again."""
    kind = draw.random()
    content = path.read_bytes()
    if kind < 0.02:
        path.unlink()
        path.mkdir()
    elif kind < 0.03:
        path.unlink()
    elif kind < 0.5 and path.suffix == ".json":
        path.write_text(mutate_json(draw, content))
        return has_seal
    elif kind < 0.5 and path.suffix == ".jsonl":
        lines = content.decode().splitlines()
        number = draw.randrange(len(lines))
        lines[number] = mutate_json(draw, lines[number])
        path.write_text("\n".join(lines) + "\n")
        return has_seal
    elif kind < 0.5 and path.suffix == ".safetensors":
        mutate_arrays(draw, path)
        return has_seal
    else:
        path.write_bytes(mutate_bytes(draw, content))
        return has_seal and kind < 0.75
    return False


# ---- what comes of it ----


def problem_of(reader, folder):
    """Why the outcome is none that may be; None if it is one."""
    from lightrft.cli.errors import describe, exit_code_of
    from lightrft.config.printable import printable

    try:
        reader.read(folder)
    except Exception as error:  # noqa: BLE001
        classes = []
        for text in reader.errors:
            module, _, name = text.partition(":")
            classes.append(getattr(importlib.import_module(module), name))
        where = traceback.extract_tb(error.__traceback__)[-1]
        shown = f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"
        text = printable(describe(error))
        if not isinstance(error, tuple(classes)) or len(text) > 10_000:
            return shown
        # Options have a line for each problem.
        several = "\n" in text.strip() and not text.startswith("invalid configuration:\n")
        if reader.code != 1 and (exit_code_of(error) != reader.code or several):
            return f"code {exit_code_of(error)}, {len(text.splitlines())} lines: {shown}"
    return None


@contextmanager
def limit(nominal: float) -> Iterator[None]:
    def stop(number, frame):
        raise TimeoutError("too slow")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds(nominal))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def damage(rank, world_size, name, folder, count):
    """Runs in a process of its own; returns what went wrong."""
    import warnings

    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    reader, folder, problems = READERS[name], Path(folder), []
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    reader.read(folder)
    status = Path("/proc/self/status").read_text()
    size = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
    valid = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for number in range(count):
        draw = random.Random(f"{name} {number}")
        path = folder / draw.choice(reader.files)
        if mutate(draw, path, reader.seal is not None):
            reader.seal(folder)
        try:
            with limit(SECONDS):
                found = problem_of(reader, folder)
        except TimeoutError:
            found = "TimeoutError: too slow"
        if found is not None:
            problems.append(f"{number}: {found}")
        for each in (path, *valid):
            if each.is_dir():
                shutil.rmtree(each)
            if not each.exists() or each == path or reader.seal is not None:
                each.write_bytes(valid[each])
    return problems


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Folders of valid files, one for each maker."""
    folders = {}

    def of(reader):
        if reader.make not in folders:
            folders[reader.make] = tmp_path_factory.mktemp("valid")
            reader.make(folders[reader.make])
        return folders[reader.make]

    return of


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused_in_one_line(made, tmp_path, name):
    reader = READERS[name]
    folder = shutil.copytree(made(reader), tmp_path / "files")
    (problems,) = run_multiprocess(
        damage, 1, timeout_seconds=120 + 2 * EXAMPLES, args=(name, str(folder), EXAMPLES)
    )
    assert not problems, f"{len(problems)} of {EXAMPLES}:\n" + "\n".join(problems)

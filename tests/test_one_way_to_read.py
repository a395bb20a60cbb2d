"""Files are read by `lightrft.config.files`, which bounds them, or by a reader that is fuzzed.

A module that reads a file in another way stands in a table here: with the reader of file_readers.py
that damages what it reads, or with the reason for which nobody else writes it.
"""

import ast
from pathlib import Path

import pytest
from tests.file_readers import READERS

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(ROOT.glob("packages/*/src/lightrft/**/*.py"))
HASHED = "a checkpoint's file, whose SHA-256 was compared before"
KERNEL = "a file that the kernel writes"
PACKAGE = "a part of the package"
PROGRAM = "a program of the user, which is run"
OWN = "a file that this process or its own ranks wrote a moment before"
BYTES = "bytes that are hashed or written, and not parsed"
TRAINED = "weights, as transformers reads them: see the reader `model weights`"

# Calls that read a whole file, bounded by nothing.
WHOLE = {"read_text", "read_bytes"}
# Calls that read and parse in one.
PARSING = {
    "load_file", "safe_open", "torch.load", "json.load", "tomllib.load", "pickle.load", "np.load",
    "numpy.load", "yaml.safe_load", "read_table", "ParquetFile", "load_from_disk", "load_dataset",
}  # fmt: skip
# By the module, below `lightrft`: the name of a reader, or a reason.
OTHERS = {
    "config/files.py": "the reader itself",
    "config/registry.py": PROGRAM,
    "datasets/files.py": "d.parquet",
    "engines/media/sources.py": "pictures",
    "kernels/lazy.py": PACKAGE,
    "models/adapter_files.py": "adapters",
    "models/critic.py": "heads",
    "models/reward_model.py": "heads",
    "models/weight_files.py": "weights",
    "rewards/consumption.py": KERNEL,
    "rewards/supervisor.py": KERNEL,
    "run/provenance.py": BYTES,
    "run/resume.py": PROGRAM,
    "strategy/checkpoints/files.py": "client state",
    "strategy/checkpoints/folders.py": BYTES,
    "strategy/checkpoints/shard_files.py": HASHED,
    "strategy/engine/session.py": KERNEL,
    "tools/audit/record.py": "arrays",
    "tools/doctor/machine_checks.py": KERNEL,
    "tools/invariance/measure.py": OWN,
    "tools/launch_command.py": PACKAGE,
    "reporting/metric_table.py": PACKAGE,
    "run/gpus.py": PACKAGE,
    "tools/commands.py": PACKAGE,
    "tools/quickstart/task.py": PACKAGE,
    "tools/report/page.py": PACKAGE,
    "tools/rewards/sandbox.py": KERNEL,
    "tools/rows/row_file.py": "rollouts",
    "tools/translate/script.py": PROGRAM,
}
REASONS = {BYTES, HASHED, KERNEL, PACKAGE, PROGRAM, OWN, TRAINED, "the reader itself"}


def opens_to_read(call):
    """Return whether a call is `open(path)` or `path.open()` in a mode that reads."""
    text, given = ast.unparse(call.func), call.args
    if text == "open":
        given = given[1:]
    elif not text.endswith(".open") or (given and not isinstance(given[0], ast.Constant)):
        return False  # of another thing than a path
    modes = [*given, *(word.value for word in call.keywords if word.arg == "mode")]
    values = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    return not any(isinstance(value, str) and set(value) & set("wax") for value in values)


def is_guarded(call):
    """Return whether a file is asked for by `regular_file`, so that no pipe is waited for."""
    is_method = is_whole(call) or ast.unparse(call.func).endswith(".open")
    path = call.func.value if is_method else call.args[0]
    return isinstance(path, ast.Call) and ast.unparse(path.func) == "regular_file"


def is_whole(call):
    return isinstance(call.func, ast.Attribute) and call.func.attr in WHOLE


def is_read(call):
    """Return whether a call reads a file in another way."""
    text = ast.unparse(call.func)
    name = text.rpartition(".")[2]
    return is_whole(call) or bool({text, name} & PARSING) or opens_to_read(call)


def reads(tree):
    """Lines of a module where a file is read in another way; to hash one is not to read it."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_read(node)]
    if calls:
        hashing = {
            id(call)
            for node in ast.walk(tree)
            if isinstance(node, ast.With) and "file_digest" in ast.dump(node)
            for call in ast.walk(node)
        }
        calls = [call for call in calls if id(call) not in hashing]
    return [call.lineno for call in calls]


def module_of(path):
    return str(path).rpartition("/src/lightrft/")[2]


@pytest.fixture(scope="module")
def reads_by_module():
    return {module_of(path): reads(ast.parse(path.read_text())) for path in PACKAGES}


def test_every_file_is_read_by_the_one_reader_or_by_a_reader_that_is_fuzzed(reads_by_module):
    other = {name: lines for name, lines in reads_by_module.items() if lines and name not in OTHERS}
    assert other == {}, "use lightrft.config.files, or name the reader in OTHERS"


@pytest.mark.full
def test_no_reader_waits_for_a_pipe():
    """Whatever reads in another way asks `regular_file` first, or says here why it need not."""
    unguarded = {}
    for path in PACKAGES:
        reason = OTHERS.get(module_of(path), "")
        if reason and reason not in (KERNEL, PACKAGE, OWN, "the reader itself"):
            nodes = ast.walk(ast.parse(path.read_text()))
            calls = [node for node in nodes if isinstance(node, ast.Call)]
            unguarded[module_of(path)] = [
                call.lineno for call in calls if is_read(call) and not is_guarded(call)
            ]
    assert {name: len(lines) for name, lines in unguarded.items() if lines} == {
        "datasets/files.py": 2,  # the library's loaders of data sets, which are folders
        "engines/media/sources.py": 1,  # named by a row, and looked at there
        "strategy/checkpoints/folders.py": 1,  # written a moment before
    }


def test_every_exception_is_one_and_names_a_reader_or_a_reason(reads_by_module):
    assert [name for name in OTHERS if not reads_by_module.get(name)] == []
    assert [
        name for name, why in OTHERS.items() if why not in READERS | dict.fromkeys(REASONS)
    ] == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(path):\n    return json.loads(path.read_text())",
        "def f(path):\n    with path.open('rb') as file:\n        return file.read()",
        "def f(path):\n    return json.load(open(path))",
        "def f(path):\n    return torch.load(path)",
        "def f(path):\n    with safe_open(path, 'pt') as file:\n        return file.keys()",
    ],
)
def test_another_way_to_read_is_seen(text):
    assert reads(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "def f(path):\n    return parse_json(read_bytes(path), path)",
        "def f(path):\n    with path.open('w') as file:\n        file.write('x')",
        "def f(path):\n    with path.open('rb') as file:\n        return file_digest(file, 'md5')",
        "def f(path):\n    return os.open(path, os.O_RDONLY)",
    ],
)
def test_the_one_way_to_read_is_not(text):
    assert not reads(ast.parse(text))

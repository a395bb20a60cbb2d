"""The distributions: what each wheel holds, and all of them in bare environments of every Python.

Interpreters are those that `uv python find` sees (put others on the PATH); for one that is not
there the tests skip and say so.
"""

import os
import re
import shlex
import shutil
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
UV = shutil.which("uv")
TOOLS = Path(sys.executable).parent
pytestmark = [
    pytest.mark.shard("wheels"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(UV is None, reason="the program uv is not here"),
    pytest.mark.skipif(
        find_spec("auditwheel") is None, reason="the group wheels is not installed: .ci/slow wheels"
    ),
]
PYTHONS = ("3.11", "3.12", "3.13")
PACKAGES = {
    member.parent.name: tuple(
        sorted(path.parent.name for path in member.parent.glob("src/lightrft/*/__init__.py"))
    )
    for member in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
ALL_PACKAGES = [f"lightrft.{name}" for names in PACKAGES.values() for name in names]
# Tests that need no file of the source tree; the last runs a notebook that trains.
TESTS = (
    "algorithms",
    "records",
    "datasets/test_supervised_rows.py",
    "reporting/test_notebook_curve.py",
)
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "ipykernel", "nbclient", "pillow", "av")
IMPORT_ALL = """
import importlib, pkgutil, sys
names = []
for package in {packages}:
    found = importlib.import_module(package)
    names += [package] + [m.name for m in pkgutil.walk_packages(found.__path__, package + ".")]
for name in names:
    importlib.import_module(name)
    assert sys.prefix in sys.modules[name].__file__, sys.modules[name].__file__
print(len(names))
"""
MISTAKES = """
from lightrft.config import TrainConfig

TrainConfig(rollout_batch_size="4", nonsense=1)
"""


def run(*command, cwd, timeout_seconds=900, path=None, environment=os.environ):
    """What a command prints; it knows nothing of this environment.

    Args:
        path: Folder of the only programs there are; without it, all of this machine's.
    """
    kept = {name: value for name, value in environment.items() if name not in ("PYTHONPATH",)}
    environment = {**kept, "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": ""}
    if path is not None:
        environment["PATH"] = str(path)
    how = {"cwd": cwd, "env": environment, "timeout_seconds": timeout_seconds}
    return run_program(*command, code=0, **how).stdout


def interpreter(version):
    """Path of a Python, or None if uv finds none; nothing is downloaded."""
    command = [UV, "python", "find", "--no-project", "--system", "--no-python-downloads", version]
    done = run_program(*command, cwd="/")
    return done.stdout.strip() if done.returncode == 0 else None


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Folder of the wheels as they would be uploaded, kernels for each Python there is."""
    folder, built = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("built")
    run(UV, "build", "--all-packages", "--wheel", "-o", built, "-q", cwd=ROOT)
    for version in filter(interpreter, PYTHONS):
        if [*built.glob(f"*-cp{version.replace('.', '')}-*")]:
            continue
        kernels = ("--package", "lightrft-kernels", "--python", interpreter(version))
        run(UV, "build", *kernels, "--wheel", "-o", built, "-q", cwd=ROOT)
    for wheel in built.glob("*.whl"):
        if "-linux_" in wheel.name:
            run(TOOLS / "auditwheel", "repair", wheel, "-w", folder, cwd=built)
        else:
            shutil.copy(wheel, folder)
    options = ("--all-packages", "--no-hashes", "--no-emit-workspace", "--no-annotate", "-q")
    (folder / "constraints.txt").write_text(run(UV, "export", *options, "--locked", cwd=ROOT))
    return folder


def wheel_of(wheels, member):
    """A member's wheel; of the kernels the one for Python 3.11."""
    (path,) = wheels.glob(
        f"lightrft_{member}-*-py3-none-any.whl" if member != "kernels" else "*-cp311-*"
    )
    return path


@pytest.mark.parametrize("member", PACKAGES)
def test_a_wheel_holds_every_file_of_its_packages_and_no_other(wheels, member):
    source = ROOT / "packages" / member / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    # Other quick starts, which are installed below the environment.
    data = ROOT / "packages" / member
    expected |= {
        x.relative_to(data).as_posix()
        for x in data.glob("data/**/*")
        if x.suffix in (".py", ".toml")
    }
    with zipfile.ZipFile(wheel_of(wheels, member)) as wheel:
        listed = [name for name in wheel.namelist() if not name.endswith("/")]
    names = {name.partition(".data/")[2] or name for name in listed}
    found = {name for name in names if ".dist-info/" not in name and not name.endswith(".so")}
    assert found == expected
    assert "lightrft/__init__.py" not in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    modules = {name.split("/")[1] for name in found if not name.startswith("data/")}
    assert modules == set(PACKAGES[member])


@pytest.mark.parametrize("member", PACKAGES)
def test_a_wheel_alone_imports_and_runs_its_readme(wheels, member, tmp_path):
    environment = tmp_path / "environment"
    run(UV, "venv", "-q", "--python", "3.11", environment, cwd=tmp_path)
    python = environment / "bin/python"
    install = ("--find-links", wheels, "--constraints", wheels / "constraints.txt")
    wheel = wheel_of(wheels, member)
    run(UV, "pip", "install", "-q", "--python", python, *install, wheel, cwd=tmp_path)
    text = (ROOT / "packages" / member / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "snippet.py").write_text(snippet)
    assert run(python, "snippet.py", cwd=folder)
    packages = [f"lightrft.{name}" for name in PACKAGES[member]]
    code = IMPORT_ALL.format(packages=packages)
    assert int(run(python, "-c", code, cwd=folder)) >= len(packages)


def test_an_index_takes_the_wheels(wheels):
    files = sorted(wheels.glob("*.whl"))
    run(TOOLS / "twine", "check", "--strict", *files, cwd=wheels)
    names = [path.name for path in files]
    there = [version for version in PYTHONS if interpreter(version)]
    assert len(names) == len(PACKAGES) + len(there), names
    for version in there:
        tag = "cp" + version.replace(".", "")
        assert any(re.search(rf"-{tag}-{tag}-manylinux_\d+_\d+_x86_64", name) for name in names)


@pytest.fixture(scope="module", params=PYTHONS)
def bare(request, wheels, tmp_path_factory):
    """An environment into which pip has installed the wheels, without a compiler or a shell."""
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"uv python find sees no Python {request.param}")
    environment = tmp_path_factory.mktemp("bare") / "environment"
    run(python, "-m", "venv", environment, cwd=environment.parent)
    # By its path: of an index whoever has the name there would be taken.
    (whole,) = wheels.glob("lightrft-*.whl")
    pip_install(environment, "--only-binary", ":all:", "--find-links", wheels, whole)
    yield environment
    shutil.rmtree(environment)  # some gigabytes


def pip_install(environment, *what):
    programs = environment / "bin"
    command = (programs / "python", "-m", "pip", "install", "--quiet", *what)
    run(*command, cwd=environment, path=programs, timeout_seconds=1500)


def in_bare(environment, command, folder, **options):
    """What a program of a bare environment prints, with no others on the PATH."""
    programs = environment / "bin"
    name, *arguments = shlex.split(command) if isinstance(command, str) else command
    return run(programs / name, *arguments, cwd=folder, path=programs, **options)


def test_a_bare_environment_has_all_of_it(bare, tmp_path):
    members = ["lightrft", *(f"lightrft-{member}" for member in PACKAGES)]
    code = f"import importlib.metadata as m; print({{m.version(n) for n in {members}}})"
    (version,) = eval(in_bare(bare, ["python", "-c", code], tmp_path))
    assert in_bare(bare, "lightrft --version", tmp_path).split() == ["lightrft", version]
    code = IMPORT_ALL.format(packages=ALL_PACKAGES)
    assert int(in_bare(bare, ["python", "-c", code], tmp_path)) > 300
    code = "import torch, deepspeed"
    with pytest.raises(AssertionError, match="No module named 'deepspeed'"):
        in_bare(bare, ["python", "-c", code], tmp_path)


def test_the_commands_of_the_readme_run_without_uv(bare, tmp_path):
    text = (ROOT / "README.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "my_reward.py").write_text(source)
    (tmp_path / "prompts.jsonl").write_text('{"input": "Count."}\n' * 8)
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL))
    commands = re.findall(r"^uv run (lightrft .*)$", blocks, flags=re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["quickstart", "init-model", "train"]
    for command in commands:
        shown = in_bare(bare, command, tmp_path)
        if "quickstart" in command:
            (accuracy,) = re.findall(
                r"held-out accuracy.*?([\d.]+)\D*$", shown, flags=re.MULTILINE
            )[-1:]
            assert float(accuracy) > 0.9, shown[-1000:]
    short = "--steps 1 --warm_start_steps 2 --eval_prompts 4 --output_dir short"
    assert "calculator" in in_bare(bare, f"lightrft quickstart --environment {short}", tmp_path)


def test_mypy_sees_the_types_of_what_is_installed(bare, tmp_path):
    text = (ROOT / "docs/library.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) > 3
    sources = dict(enumerate(blocks)) | {
        "all": "\n".join(f"import {name}" for name in ALL_PACKAGES)
    }
    for name, source in sources.items():
        (tmp_path / f"script_{name}.py").write_text(source)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    python = ("--python-executable", bare / "bin/python", "--no-incremental")
    scripts = sorted(path.name for path in tmp_path.glob("script_*.py"))
    assert "Success" in run(TOOLS / "mypy", *python, *scripts, cwd=tmp_path)
    done = run_program(TOOLS / "mypy", *python, "mistakes.py", cwd=tmp_path)
    assert '"rollout_batch_size" to "TrainConfig" has incompatible type' in done.stdout
    assert 'Unexpected keyword argument "nonsense"' in done.stdout


def test_the_tests_and_a_notebook_run_on_what_is_installed(bare, tmp_path):
    pip_install(bare, *TEST_TOOLS)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=ignored)
    tests = [f"tests/{name}" for name in TESTS]
    shown = in_bare(bare, ["python", "-m", "pytest", "-q", *tests], tmp_path)
    (passed,) = re.findall(r"(\d+) passed", shown)
    assert int(passed) > 300, shown[-1000:]
    assert "skipped" not in shown, shown[-1000:]

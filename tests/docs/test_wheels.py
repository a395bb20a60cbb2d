"""Each package's wheel alone in a fresh environment: it holds everything and runs its README."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from tests.machine import seconds

ROOT = Path(__file__).resolve().parents[2]
UV = shutil.which("uv")
pytestmark = [
    pytest.mark.shard("quickstart"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(UV is None, reason="the program uv is not here"),
]
PACKAGES = {
    member.parent.name: tuple(
        sorted(path.parent.name for path in member.parent.glob("src/lightrft/*/__init__.py"))
    )
    for member in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
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


def run(*command, cwd, timeout_seconds=900):
    """What a command prints; it knows nothing of this environment."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH",)}
    environment = {**kept, "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": ""}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds(timeout_seconds),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    run(UV, "build", "--all-packages", "--wheel", "-o", folder, "-q", cwd=ROOT)
    options = ("--all-packages", "--no-hashes", "--no-emit-workspace", "--no-annotate", "-q")
    (folder / "constraints.txt").write_text(run(UV, "export", *options, "--locked", cwd=ROOT))
    return folder


def wheel_of(wheels, member):
    (path,) = wheels.glob(f"lightrft_{member}-*.whl")
    return path


@pytest.mark.parametrize("member", PACKAGES)
def test_a_wheel_holds_every_file_of_its_packages_and_no_other(wheels, member):
    source = ROOT / "packages" / member / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    with zipfile.ZipFile(wheel_of(wheels, member)) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    found = {name for name in names if ".dist-info/" not in name and not name.endswith(".so")}
    assert found == expected
    assert "lightrft/__init__.py" not in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[1] for name in found} == set(PACKAGES[member])


@pytest.mark.parametrize("member", PACKAGES)
def test_a_wheel_alone_imports_and_runs_its_readme(wheels, member, tmp_path):
    environment = tmp_path / "environment"
    run(UV, "venv", "-q", "--python", "3.11", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
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

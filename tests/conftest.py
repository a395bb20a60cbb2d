"""Fixtures of every test, and the settings of its process; the hooks are in hooks.py.

`benchmarks/peers` and `benchmarks/pretrained` have them, too: each conftest there imports this one.
"""

import os
from pathlib import Path

import pytest
from tests import hooks, machine

machine.publish()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch asks oneDNN, not its own setting, whether bfloat16 attention may use AMX, and then fails.
if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(pluginmanager):
    """Register the hooks once, whichever folders a run of the tests collects."""
    if not pluginmanager.has_plugin(hooks.__name__):
        pluginmanager.register(hooks, hooks.__name__)


@pytest.fixture(scope="session")
def repository():
    """Root of the working tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def test_data():
    """Folder with real data sets; tests that need it skip without it."""
    folder = Path(os.environ.get("LIGHTRFT_TEST_DATA", REPOSITORY.parent / "shared/data"))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set LIGHTRFT_TEST_DATA")
    return folder


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """What runs remember of media; uv keeps its own, which is large."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("UV_CACHE_DIR", str(usual / "uv"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def one_thread():
    """Two tests on one machine must not fight for cores, and sums must not depend on them."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def told():
    """Lines that this process tells a run's console, details among them."""
    from lightrft.strategy.distributed.context import console_sink

    lines = []
    with console_sink(lambda text, _: lines.append(text)):
        yield lines

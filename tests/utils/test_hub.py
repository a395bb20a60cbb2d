"""Names of the hub are asked for once: an unreachable hub costs seconds, not minutes."""

import socket

import pytest

from lightrft.models import loading
from lightrft.models.loading import ModelLoadError, load_tokenizer
from lightrft.utils import hub
from lightrft.utils.hub import is_hub_reachable


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """Nothing says offline; no proxy."""
    for name in (
        "HF_HUB_OFFLINE",
        "HTTP_PROXY",
        "http_proxy",
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    # Private: an answer is remembered for the process, beyond this test.
    hub.answers.cache_clear()
    yield
    hub.answers.cache_clear()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(server):
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_listens_is_reachable(listener, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", address(listener))
    assert is_hub_reachable()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not is_hub_reachable()


def test_a_proxy_stands_for_the_hub(listener, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert not is_hub_reachable()
    monkeypatch.setenv("http_proxy", address(listener))
    assert is_hub_reachable()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://[::", "nonsense", ""])
def test_what_cannot_be_connected_to_is_not(endpoint, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert not is_hub_reachable()


def test_without_the_hub_only_the_cache_is_asked_and_a_missing_model_is_one_line(
    listener, monkeypatch
):
    asked = []

    class Auto:
        @staticmethod
        def from_pretrained(path, *, local_files_only, trust_remote_code):
            assert trust_remote_code is False
            asked.append(local_files_only)
            raise OSError(f"{path} is nowhere\nand more lines")

    monkeypatch.setattr(loading, "AutoTokenizer", Auto)
    for endpoint in ("http://127.0.0.1:9", address(listener)):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(ModelLoadError, match="owner/name is nowhere") as caught:
            load_tokenizer("owner/name")
        assert "\n" not in str(caught.value)
    assert asked == [True, False]

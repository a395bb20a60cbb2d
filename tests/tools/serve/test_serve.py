"""`lightrft serve`: a model of a folder or a run at the endpoint of agents."""

import threading

import httpx
import pytest

from lightrft.cli.errors import UsageError
from lightrft.config import TrainConfig
from lightrft.tools.model_presets import write_tiny_model
from lightrft.tools.serve.serve_command import Service, build_parser, run, served

TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    write_tiny_model(folder, "tiny-qwen3", seed=1)
    return folder


@pytest.fixture(scope="module")
def service(model):
    path, config = served(model, "hermes")
    with Service(path, config, port=0, key="sk-own") as service:
        threading.Thread(target=service.serve, daemon=True).start()
        yield service


def post(service, path="chat/completions", **options):
    body = {"model": "policy", "max_tokens": 8, **options}
    headers = {"authorization": "Bearer sk-own"}
    return httpx.post(f"{service.endpoint.base_url}/{path}", json=body, headers=headers, timeout=60)


def test_a_conversation_is_answered_and_goes_on(service):
    first = post(service, messages=TALK, temperature=0)
    assert first.status_code == 200
    talk = [*TALK, first.json()["choices"][0]["message"], *TALK]
    second = post(service, messages=talk, temperature=0).json()
    used = first.json()["usage"]
    # The ids of the first answer are reused, and followed by what is new.
    assert second["usage"]["prompt_tokens"] > used["total_tokens"]


def test_options_of_clients_count(service):
    texts = {
        post(service, messages=TALK, temperature=0).json()["choices"][0]["message"]["content"]
        for _ in range(2)
    }
    assert len(texts) == 1
    wrong = post(service, messages=TALK, top_p=2.0)
    assert wrong.status_code == 400
    assert "top_p=2.0" in wrong.json()["error"]["message"]
    assert post(service, "completions", prompt="Once", n=2).json()["choices"][1]["index"] == 1


def test_texts_beyond_the_model_are_refused(service):
    answer = post(service, messages=[{"role": "user", "content": "long " * 20_000}])
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_what_is_served(model, tmp_path):
    assert served(model, None) == (model, TrainConfig())
    folder = tmp_path / "run"
    folder.mkdir()
    TrainConfig(pretrain=str(model), output_dir=str(folder), temperature=0.5).save(
        folder / "config.toml"
    )
    with pytest.raises(UsageError, match="holds no model"):
        served(folder, None)
    (folder / "model").symlink_to(model)
    path, config = served(folder, "llama")
    assert (path, config.temperature, config.tool_parser) == (folder / "model", 0.5, "llama")


def test_wrong_calls_are_usage_errors(model, monkeypatch):
    with pytest.raises(UsageError, match="the environment has no NO_SUCH_KEY"):
        run([str(model), "--api_key_env", "NO_SUCH_KEY"])
    with pytest.raises(UsageError, match="holds no model"):
        run([str(model / "none")])
    assert build_parser().parse_args([str(model)]).port == 8000

"""`lightrft serve`: a model of a folder or a run at the endpoint of agents."""

import shutil
import threading
from dataclasses import replace

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.machine import wait_until
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.rollout.agents.image_agents import said
from tests.rollout.image_environments import squares

from lightrft.cli.errors import UsageError
from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import DataError
from lightrft.models.loading import SCORE_FILE
from lightrft.tools.model_presets import write_tiny_model
from lightrft.tools.serve import chat_model
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


def test_a_seed_draws_alike_whenever_and_beside_whatever_it_is_asked(service):
    def said(**options):
        answer = post(service, messages=TALK, seed=4, temperature=1.0, **options).json()
        return [choice["message"]["content"] for choice in answer["choices"]]

    first = said()
    three = said(n=3)
    assert said() == first == three[:1]
    assert len({*three}) == 3
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(said())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [first] * 3
    # Where it ends moves nothing before its end.
    assert first[0].startswith(said(max_tokens=2)[0].rstrip("\N{REPLACEMENT CHARACTER}"))


@pytest.mark.parametrize("temperature", [1e-320, 1e-38, 9e-6])
def test_a_temperature_that_no_logit_can_be_divided_by_is_refused(service, temperature):
    answer = post(service, messages=TALK, temperature=temperature)
    assert answer.status_code == 400
    assert "(expected 0 or >= 1e-05)" in answer.json()["error"]["message"]
    assert post(service, messages=TALK, temperature=1e-5).status_code == 200


def test_a_call_that_fails_fails_alone(service, monkeypatch, capsys):
    """Four calls wait while one is answered, and make one round; one of them breaks the engine."""
    sample, sizes, first = service.model.sample, [], threading.Event()

    def breaks(how, asked):
        sizes.append(len(asked))
        if not first.is_set():
            first.set()
            assert wait_until(lambda: service.endpoint.events.qsize() == 4)
        if any(len(each.prompt_token_ids) > 60 for each in asked):
            raise FloatingPointError("the logits are not finite\nand more")
        return sample(how, asked)

    monkeypatch.setattr(service.model, "sample", breaks)
    answers = {}

    def ask(number):
        text = "x " * (100 if number == 2 else number)
        talk = [{"role": "user", "content": text}]
        answers[number] = post(service, messages=talk, temperature=0.5).status_code

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    threads[0].start()
    assert first.wait(60)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {0: 200, 1: 200, 2: 500, 3: 200, 4: 200}
    assert sizes[:2] == [1, 4]
    shown = capsys.readouterr().out
    assert shown == "a call failed: FloatingPointError: the logits are not finite\n"


def test_texts_beyond_the_model_are_refused(service):
    answer = post(service, messages=[{"role": "user", "content": "long " * 20_000}])
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_images_are_shown_to_models_that_read_them(service, tmp_path):
    shown = [said("Look.", squares(1, (84, 84)))]
    refused = post(service, messages=shown).json()["error"]["message"]
    assert refused == "images are not supported: of this model only text is read"
    write_tiny_vision_model(tmp_path / "model", "tiny-qwen2.5-vl", seed=1)
    path, config = served(tmp_path / "model", "hermes")
    with Service(path, config, port=0, key="sk-own") as seeing:
        threading.Thread(target=seeing.serve, daemon=True).start()
        first = post(seeing, messages=shown, logprobs=True).json()
        other = post(seeing, messages=[said("Look.", squares(2, (84, 84)))], logprobs=True).json()
        assert first["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
        told = [each["choices"][0]["logprobs"]["content"] for each in (first, other)]
        assert told[0] != told[1]


def test_a_model_whose_images_no_turn_can_follow_answers_texts(tmp_path):
    write_tiny_vision_model(tmp_path / "model", "tiny-mllama", seed=1)
    path, config = served(tmp_path / "model", "hermes")
    with Service(path, config, port=0, key="sk-own") as texts:
        threading.Thread(target=texts.serve, daemon=True).start()
        assert post(texts, messages=TALK).status_code == 200
        assert post(texts, messages=[said("Look.", squares(1))]).status_code == 400


def test_the_advice_about_a_missing_template_can_be_followed(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    template = (folder / "chat_template.jinja").rename(tmp_path / "turns.jinja")
    with pytest.raises(DataError, match="--chat_template FILE"):
        run([str(folder), "--port", "0"])
    options = build_parser().parse_args([str(folder), "--chat_template", str(template)])
    path, config = served(folder, None, options.chat_template)
    with Service(path, config, port=0, key=None) as texts:
        assert "<|user|>" in texts.model.chat.chat_ids.render(TALK, ())


def test_what_is_served(model, tmp_path):
    assert served(model, None) == (model, TrainConfig())
    folder = tmp_path / "run"
    folder.mkdir()
    of_run = TrainConfig(pretrain=str(model), output_dir=str(folder), temperature=0.5)
    # The saved model has it.
    replace(of_run, chat_template="gone.jinja").save(folder / "config.toml")
    with pytest.raises(UsageError, match="holds no model"):
        served(folder, None)
    (folder / "model").symlink_to(model)
    path, config = served(folder, "llama")
    assert (path, config.temperature, config.tool_parser) == (folder / "model", 0.5, "llama")
    assert config.chat_template is None


def test_a_lack_of_memory_is_not_called_a_fault_of_the_weights(model, monkeypatch):
    def full(config):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(chat_model, "build_engine", full)
    with pytest.raises(torch.OutOfMemoryError):
        run([str(model), "--port", "0"])


def test_a_model_that_cannot_answer_is_refused_in_one_line(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks 1 parameters \(first: model.norm.weight\)"):
        run([str(folder), "--port", "0"])
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(9999)
    with pytest.raises(UsageError, match="the model cannot be read: cannot read the weights"):
        run([str(folder), "--port", "0"])
    (folder / SCORE_FILE).touch()
    with pytest.raises(ConfigError, match="is a reward model"):
        run([str(folder), "--port", "0"])


def test_wrong_calls_are_usage_errors(model, monkeypatch):
    with pytest.raises(UsageError, match="the environment has no NO_SUCH_KEY"):
        run([str(model), "--api_key_env", "NO_SUCH_KEY"])
    with pytest.raises(UsageError, match="holds no model"):
        run([str(model / "none")])
    assert build_parser().parse_args([str(model)]).port == 8000
    with pytest.raises(
        UsageError, match="--port: got '70000', expected a number >= 0 and <= 65535"
    ):
        run([str(model), "--port", "70000"])

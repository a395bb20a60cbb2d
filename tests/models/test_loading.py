"""Errors of incomplete checkpoints name the path and what is missing, in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lightrft.config import ConfigError, TrainConfig
from lightrft.models import ModelLoadError, load_causal_lm, load_config, load_tokenizer, load_trunk
from lightrft.tools.model_presets import write_tiny_model


@pytest.fixture
def broken(checkpoints, tmp_path):
    """A copy of a checkpoint to remove files from."""
    return shutil.copytree(checkpoints["tiny-qwen3"], tmp_path / "model")


def fails(function, path, message):
    with pytest.raises(ModelLoadError, match=message) as caught:
        function(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_directory(tmp_path):
    for function in (load_config, load_tokenizer, load_causal_lm, load_trunk):
        fails(function, tmp_path / "nowhere", "no model directory at")


def test_missing_configuration(broken):
    (broken / "config.json").unlink()
    fails(load_causal_lm, broken, "no configuration in .* expected config.json")


def test_missing_weights(broken):
    (broken / "model.safetensors").unlink()
    fails(load_causal_lm, broken, "no weights in .* expected")
    fails(load_trunk, broken, "no weights in")


def test_missing_tokenizer(broken):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()
    fails(load_tokenizer, broken, "no tokenizer in")


def test_unreadable_files(broken):
    (broken / "model.safetensors").write_bytes(b"not a checkpoint")
    fails(load_causal_lm, broken, "cannot load the model")
    (broken / "config.json").write_text('{"model_type": "no-such-model"}')
    fails(load_config, broken, "cannot read the configuration")


def test_unknown_model_id_without_network():
    fails(load_config, "nobody/no-such-model", "cannot read the configuration of")


def test_unknown_dtype(checkpoint):
    with pytest.raises(ValueError, match="unknown dtype 'fp8': expected one of float32, bfloat16"):
        load_causal_lm(checkpoint, dtype="fp8")


THINKING = "{% if enable_thinking | default(true) %}<think>{% endif %}{{ messages[0].content }}"


def rendered(folder: Path, **options: object) -> str:
    tokenizer = load_tokenizer(str(folder), TrainConfig(**options))
    messages = [{"role": "user", "content": "2+2?"}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


@pytest.mark.parametrize("lead", ["", "\n", "{%- set ns = namespace() %}\n"])
def test_arguments_of_the_chat_template_reach_whatever_renders_by_it(tmp_path, lead):
    write_tiny_model(tmp_path / "model", "tiny-qwen3")
    (tmp_path / "chat.jinja").write_text(lead + THINKING)
    given = {"chat_template": str(tmp_path / "chat.jinja")}
    plain = rendered(tmp_path / "model", **given)
    off = rendered(tmp_path / "model", **given, chat_template_args={"enable_thinking": False})
    assert plain.replace("<think>", "") == off != plain


def test_the_newest_arguments_of_a_chat_template_win(tmp_path):
    write_tiny_model(tmp_path / "model", "tiny-qwen3")
    (tmp_path / "chat.jinja").write_text(THINKING + "{{ effort }}")
    first = load_tokenizer(
        str(tmp_path / "model"),
        TrainConfig(
            chat_template=str(tmp_path / "chat.jinja"),
            chat_template_args={"enable_thinking": False, "effort": 'a "high" one'},
        ),
    )
    first.save_pretrained(tmp_path / "model")
    assert rendered(tmp_path / "model") == '2+2?a "high" one'
    again = {"enable_thinking": True}
    assert rendered(tmp_path / "model", chat_template_args=again) == '<think>2+2?a "high" one'


def test_an_argument_that_no_chat_template_reads_is_refused(tmp_path):
    write_tiny_model(tmp_path / "model", "tiny-qwen3")
    with pytest.raises(ConfigError, match="got enable_thinkin, which the chat template does not"):
        rendered(tmp_path / "model", chat_template_args={"enable_thinkin": False})


def test_shapes_are_compared_before_weights_are_read(broken):
    from transformers import AutoModelForCausalLM

    from lightrft.stages.opening import check_parts

    config = TrainConfig(pretrain=str(broken))
    check_parts(config, AutoModelForCausalLM)
    file = broken / "config.json"
    settings = json.loads(file.read_text())
    size = settings["intermediate_size"]
    file.write_text(json.dumps(settings | {"intermediate_size": 2 * size}))
    with pytest.raises(ConfigError, match=rf"tensors in the files of .*\[.*\b{size}\b.*\] instead"):
        check_parts(config, AutoModelForCausalLM)
    check_parts(config.replaced({"allow_new_weights": ["*"]}), AutoModelForCausalLM)

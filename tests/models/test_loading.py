"""Errors of incomplete checkpoints name the path and what is missing, in one line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import tiny_model

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.files import FileError
from lightrft.engines.hf.engine import HFEngine
from lightrft.engines.types import EngineConfig
from lightrft.models import ModelLoadError, load_causal_lm, load_config, load_tokenizer, load_trunk
from lightrft.models.statements import read_statements
from lightrft.models.weight_files import count_model
from lightrft.strategy.checkpoints.gathered_model import WeightFiles
from lightrft.strategy.meta_init import parameters_on_meta
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


@pytest.mark.parametrize(
    "files, load, said",
    [
        (("config.json",), load_causal_lm, "no configuration in .* expected config.json"),
        (("model.safetensors",), load_causal_lm, "no weights in .* expected"),
        (("model.safetensors",), load_trunk, "no weights in"),
        (("tokenizer.json", "tokenizer_config.json"), load_tokenizer, "no tokenizer in"),
    ],
)
def test_missing_files_are_named(broken, files, load, said):
    for name in files:
        (broken / name).unlink()
    fails(load, broken, said)


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


def rendered(folder, **options):
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


def test_a_template_that_writes_the_day_gets_one_day_for_the_whole_run(tmp_path):
    write_tiny_model(tmp_path / "model", "tiny-qwen3")
    day = "{%- macro say() %}{{- strftime_now('%d %b %Y') }}{%- endmacro %}"
    (tmp_path / "chat.jinja").write_text(day + '{{ say() + strftime_now("%Y") }}')
    chat = {"chat_template": f"{tmp_path}/chat.jinja"}
    assert rendered(tmp_path / "model", **chat) == "01 Jan 20252025"
    chosen = TrainConfig(**chat, chat_template_args={"strftime_now": "2026-02-03"})
    statements = read_statements(f"{tmp_path}/model", chosen)
    statements.tokenizer.save_pretrained(tmp_path / "model")
    assert rendered(tmp_path / "model") == "03 Feb 20262026"
    lines = []
    statements.say(lines.append)
    assert "gets one day for the whole run" in "".join(lines)
    with pytest.raises(ConfigError, match="strftime_now is 'today', expected a day such as"):
        rendered(tmp_path / "model", chat_template_args={"strftime_now": "today"})


def test_an_argument_that_no_chat_template_reads_is_refused(tmp_path):
    write_tiny_model(tmp_path / "model", "tiny-qwen3")
    with pytest.raises(ConfigError, match="got enable_thinkin, which the chat template does not"):
        rendered(tmp_path / "model", chat_template_args={"enable_thinkin": False})


def test_shapes_are_compared_before_weights_are_read(broken):
    from transformers import AutoModelForCausalLM

    from lightrft.stages.start_checks import check_parts

    config = TrainConfig(pretrain=str(broken))
    check_parts(config, AutoModelForCausalLM)
    file = broken / "config.json"
    settings = json.loads(file.read_text())
    size = settings["intermediate_size"]
    file.write_text(json.dumps(settings | {"intermediate_size": 2 * size}))
    with pytest.raises(ConfigError, match=rf"tensors in the files of .*\[.*\b{size}\b.*\] instead"):
        check_parts(config, AutoModelForCausalLM)
    check_parts(config.replaced({"allow_new_weights": ["*"]}), AutoModelForCausalLM)


def test_files_of_weights_that_the_model_does_not_name_are_left_alone(tmp_path):
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    tiny_model("qwen2", seed=9).save_pretrained(tmp_path / "other", max_shard_size="40KB")
    for file in (tmp_path / "other").glob("*.safetensors"):
        target = tmp_path / "model" / file.name
        if not target.exists():
            shutil.copy(file, target)
    files = WeightFiles(tmp_path / "model", model)
    for name, value in model.state_dict().items():
        assert torch.equal(files.rows(name, 0, len(value)), value), name
    assert count_model(str(tmp_path / "model")) == sum(v.numel() for v in model.parameters())


def test_of_experts_that_are_one_tensor_only_the_wanted_rows_are_read(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = tiny_model("qwen3_moe", **experts)
    model.save_pretrained(tmp_path)
    whole = tmp_path / "model.safetensors"
    for name, value in load_file(whole).items():
        save_file({name: value}, tmp_path / f"model-{name}.safetensors")
    whole.unlink()
    files = WeightFiles(tmp_path, model)
    # Other experts are gone before anything is read.
    for file in tmp_path.glob("model-*.safetensors"):
        if ".experts.2." not in file.name:
            file.unlink()
    names = [name for name in files.names if ".experts." in name]
    assert len(names) == 4
    for name in names:
        value = model.get_parameter(name)
        assert torch.equal(files.rows(name, 2, 3), value[2:3])
        with pytest.raises(FileError):
            files.rows(name, 1, 3)


@pytest.fixture
def head_of_its_own(tmp_path):
    """A model whose configuration says that its head is tied, which its file contradicts."""
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return tmp_path


def test_a_head_that_only_the_file_knows_is_the_engines_and_the_saved_models(head_of_its_own):
    model = load_causal_lm(str(head_of_its_own)).eval()
    assert model.config.tie_word_embeddings is False
    ids = torch.arange(2, 12)
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, ids[1:, None]).squeeze(-1)
    config = EngineConfig("hf", str(head_of_its_own), options={"device": "cpu"})
    scores = torch.tensor(HFEngine(config, module=model).score(ids.tolist())[1:])
    assert torch.allclose(scores, expected, atol=1e-5)


def test_a_head_that_only_the_file_knows_is_refused_without_memory(head_of_its_own):
    def load(path):
        with parameters_on_meta():
            load_causal_lm(path)

    fails(load, head_of_its_own, "says tie_word_embeddings and has two different tensors")

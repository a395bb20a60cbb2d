"""Files of a model that contradict each other: each pair gives its documented line."""

import json
import shutil

import pytest
from transformers import AutoTokenizer, GenerationConfig

from lightrft.cli.main import main
from lightrft.config import ConfigError
from lightrft.models import Actor
from lightrft.models.statements import read_statements
from lightrft.tools.model_presets import write_tiny_model

GENERATION = "generation_config.json"
FOREIGN = "{% for message in messages %}{{ message['content'] }}TAIL{% endfor %}"


@pytest.fixture(scope="session")
def consistent(tmp_path_factory):
    """A model whose files agree."""
    folder = tmp_path_factory.mktemp("consistent") / "m"
    write_tiny_model(folder, "tiny-qwen3", seed=1)
    return folder


@pytest.fixture
def model(consistent, tmp_path):
    return shutil.copytree(consistent, tmp_path / "m")


def edit(folder, file="config.json", **values):
    """Changes fields of a file of JSON; None removes them."""
    path = folder / file
    fields = json.loads(path.read_text()) if path.exists() else {}
    fields = {k: v for k, v in (fields | values).items() if v is not None}
    path.write_text(json.dumps(fields))


def only_tokenizer_ends(folder):
    edit(folder, eos_token_id=-1)
    edit(folder, GENERATION, eos_token_id=None)


def with_template(template, *, end=False):
    def plant(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        if not end:
            tokenizer.eos_token = None
        tokenizer.save_pretrained(folder)

    return plant


def with_tokens(*tokens):
    def plant(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(list(tokens))
        tokenizer.save_pretrained(folder)

    return plant


def writing(before="", behind=""):
    """Makes the tokenizer write tokens around a text."""

    def plant(folder):
        core = json.loads((folder / "tokenizer.json").read_text())
        ids = {each["content"]: each["id"] for each in core["added_tokens"]}
        parts = [*([before] if before else []), None, *([behind] if behind else [])]
        single = [
            {"Sequence": {"id": "A", "type_id": 0}}
            if part is None
            else {"SpecialToken": {"id": part, "type_id": 0}}
            for part in parts
        ]
        core["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                name: {"id": name, "ids": [ids[name]], "tokens": [name]}
                for name in filter(None, parts)
            },
        }
        (folder / "tokenizer.json").write_text(json.dumps(core))

    return plant


def settings(file="config.json", **values):
    return lambda folder: edit(folder, file, **values)


def both(*plants):
    return lambda folder: [plant(folder) for plant in plants]


def text_of(file, text):
    return lambda folder: (folder / file).write_text(text)


def two_templates(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<|end|>")
    edit(folder, "tokenizer_config.json", chat_template="{{ messages }}")


ANSWERED = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|user|>"
ANSWERED += "{% endif %}{% endfor %}"
DECIDED = {
    "an end of the tokenizer": (
        only_tokenizer_ends,
        "ends of turn: generation stops at '<|end|>' (tokenizer, chat template)",
    ),
    "an end of the template": (
        with_template(ANSWERED, end=True),
        "ends of turn: generation stops at '<|end|>' (tokenizer, config.json, "
        "generation_config.json) and at '<|user|>' (chat template)",
    ),
    "an end of the generation config": (
        both(only_tokenizer_ends, settings(GENERATION, eos_token_id=65)),
        "ends of turn: generation stops at '<|end|>' (tokenizer, chat template) and at 'A' "
        "(generation_config.json)",
    ),
    "an end that is no token": (
        settings(eos_token_id=50256),
        "ends of turn: 50256 (config.json) is no token of the model: left out",
    ),
    "ends in a list": (
        settings(GENERATION, eos_token_id=[257, 50256]),
        "ends of turn: 50256 (generation_config.json) is no token of the model: left out",
    ),
    "no end": (
        both(only_tokenizer_ends, with_template("{{ messages[-1]['content'] }}")),
        "warning: no end of turn is declared by the tokenizer, the chat template or the "
        "configurations of {path}: responses end only at their bound of tokens, so set "
        "eos_token_id in generation_config.json",
    ),
    "text behind an answer": (
        with_template(FOREIGN, end=True),
        "ends of turn: the chat template writes 'TAIL' behind an answer, which begins with no "
        "special token: generation does not stop there",
    ),
    "a text is begun": (
        writing(before="<|system|>"),
        "texts: the tokenizer writes '<|system|>' before each of them",
    ),
    "a text is ended": (
        writing(behind="<|end|>"),
        "texts: the tokenizer writes '<|end|>' behind each of them",
    ),
    "two beginnings": (
        both(writing(before="<|system|>"), settings(bos_token_id=66)),
        "texts: config.json begins them with 'B' and the tokenizer with '<|system|>': the "
        "tokenizer's is taken",
    ),
    "a beginning that is not written": (
        settings("tokenizer_config.json", add_bos_token=True),
        "texts: tokenizer_config.json has add_bos_token = true, and the tokenizer writes nothing "
        "before a text: what it writes is taken",
    ),
    "an end that is not written": (
        settings("tokenizer_config.json", add_eos_token=True),
        "texts: tokenizer_config.json has add_eos_token = true, and the tokenizer writes nothing "
        "behind a text: what it writes is taken",
    ),
    "an end that is written": (
        both(writing(behind="<|end|>"), settings("tokenizer_config.json", add_eos_token=False)),
        "texts: tokenizer_config.json has add_eos_token = false, and the tokenizer writes "
        "'<|end|>' behind a text: what it writes is taken",
    ),
    "rows that are no tokens": (
        settings(vocab_size=300),
        "vocabulary: the model has 300 rows and the tokenizer 261 ids: the last 39 rows are "
        "neither sampled nor trained",
    ),
    "two templates": (
        two_templates,
        "chat template: chat_template.jinja and tokenizer_config.json hold different ones: "
        "chat_template.jinja is taken",
    ),
    "temperature without sampling": (
        settings(GENERATION, do_sample=False, temperature=0.9),
        "generation_config.json of {path}: it has sampling options without do_sample: it is "
        "written with do_sample = true",
    ),
    "beams that are not searched": (
        settings(GENERATION, early_stopping=True, num_beams=1),
        "generation_config.json of {path}: transformers does not write early_stopping: left out",
    ),
    "a negative padding": (
        settings(GENERATION, pad_token_id=-1, top_p=0.9),
        "generation_config.json of {path}: transformers does not write pad_token_id, top_p: left "
        "out",
    ),
}
REFUSED = {
    "a token too many": (
        with_tokens("<tool>"),
        "pretrain: the tokenizer of {path} has ids up to 261 ('<tool>') and the model 261 rows: "
        "give the tokenizer of this model, or enlarge the model first (resize_token_embeddings)",
    ),
    "padding beyond the rows": (
        settings(pad_token_id=261),
        "pretrain: config.json of {path} has pad_token_id 261 and 261 rows: give an id of the "
        "model, or null",
    ),
    "another class": (
        settings(architectures=["LlamaForCausalLM"]),
        "pretrain: config.json of {path} has model_type qwen3 and architectures LlamaForCausalLM, "
        "another model: make them agree",
    ),
    "several answers of one": (
        settings(GENERATION, num_return_sequences=3),
        "generation_config.json of {path}: Greedy methods (do_sample != True) without beam search "
        "do not support `num_return_sequences` different than 1 (got 3).: correct it, or remove it",
    ),
    "no JSON": (
        text_of(GENERATION, "{nope"),
        "generation_config.json of {path}: It looks like the config file at '{path}/"
        "generation_config.json' is not a valid JSON file.: correct it, or remove it",
    ),
}


def said_of(model):
    said = []
    read_statements(str(model)).require_consistent().say(said.append)
    return said


def test_files_that_agree_give_no_line(model):
    assert said_of(model) == []


@pytest.mark.parametrize("name", DECIDED)
def test_a_contradiction_is_decided_and_said_in_one_line(model, name):
    plant, line = DECIDED[name]
    plant(model)
    assert line.replace("{path}", str(model)) in said_of(model)


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradiction_without_a_rule_is_refused(model, name):
    plant, line = REFUSED[name]
    plant(model)
    with pytest.raises(ConfigError) as caught:
        read_statements(str(model)).require_consistent()
    assert str(caught.value) == line.replace("{path}", str(model))


def test_the_doctor_says_the_same(model, capsys):
    only_tokenizer_ends(model)
    assert main(["doctor", "--pretrain", str(model)]) == 0
    assert DECIDED["an end of the tokenizer"][1] in capsys.readouterr().out
    with_tokens("<tool>")(model)
    assert main(["doctor", "--pretrain", str(model)]) == 2
    assert "has ids up to 261" in capsys.readouterr().err
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(9999)
    assert main(["doctor", "--pretrain", str(model)]) == 2
    assert "model.safetensors is cut" in capsys.readouterr().err


def test_a_generation_config_that_transformers_refuses_is_saved_repaired(model, tmp_path):
    edit(model, GENERATION, do_sample=False, temperature=0.9)
    Actor.from_pretrained(str(model)).model.save_pretrained(tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (saved.do_sample, saved.temperature, saved.eos_token_id) == (True, 0.9, 257)

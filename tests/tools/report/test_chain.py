"""Provenance: hashes of runs, data and models, and the chain that a report draws from them."""

import json
import shutil

import pytest

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.config.files import file_sha256
from lightrft.datasets.row_origin import write_origin
from lightrft.reporting.files import START_FILE, read_json, write_start
from lightrft.run.provenance import (
    describe_models,
    fingerprint,
    run_hash,
    run_of_model,
    write_model_run,
)
from lightrft.run.resume import describe_inputs
from lightrft.tools.model_presets import write_tiny_model
from lightrft.tools.report.chain import chain_of


def make_run(folder, stage, *, data=None, **options):
    """A run's folder with the two files that name it, made from those of the runs before."""
    (folder / "model").mkdir(parents=True)
    config = TrainConfig(prompt_data=None if data is None else str(data), **options)
    inputs, models = describe_inputs(config), describe_models(config)
    digest = run_hash(folder.name, inputs, models)
    start = folder / START_FILE
    write_start(start, world_size=1, inputs=inputs, stage=stage, models=models, run_sha256=digest)
    (folder / "model" / "model.safetensors").write_bytes(folder.name.encode() * 99)
    write_model_run(folder / "model", folder, run_sha256=digest, stage=stage)
    return folder / "model"


def make_rows(path, run):
    """A file of rows that were sampled in a run."""
    path.write_text(f"{run}\n")
    facts = run_of_model(run / "model")
    of_run = {"run_path": facts["path"], "run_sha256": facts["run_sha256"], "stage": "sft"}
    write_origin(path, {**of_run, "run": run.name, "rows_sha256": file_sha256(path), "tokens": {}})
    return path


@pytest.fixture
def pipeline(tmp_path):
    """sft -> pairs -> reward -> grpo -> student, in folders of these names."""
    untrained = tmp_path / "untrained"
    untrained.mkdir()
    (untrained / "model.safetensors").write_bytes(b"random")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    sft = make_run(tmp_path / "sft", "sft", data=tmp_path / "rows.jsonl", pretrain=str(untrained))
    pairs = make_rows(tmp_path / "pairs.jsonl", tmp_path / "sft")
    reward = make_run(tmp_path / "reward", "reward", data=pairs, pretrain=str(sft))
    grpo = make_run(tmp_path / "grpo", "policy", pretrain=str(sft), reward_pretrain=(str(reward),))
    student = {"pretrain": str(untrained), "teacher": str(grpo)}
    make_run(tmp_path / "student", "divergence", **student)
    return tmp_path


def digits(folder):
    return read_json(folder / START_FILE)["run_sha256"][:12]


def weights(folder):
    return fingerprint(folder)[:12]


def test_the_whole_chain_is_drawn(pipeline):
    rows, pairs = (file_sha256(pipeline / f"{name}.jsonl")[:12] for name in ("rows", "pairs"))
    base = f"{pipeline.name}/untrained, weights {weights(pipeline / 'untrained')}"

    def named(name, stage):
        return f"{name} ({stage}, {digits(pipeline / name)})"

    def model(name):
        return f"{name}/model, weights {weights(pipeline / name / 'model')}"

    assert chain_of(pipeline / "student") == [
        named("student", "divergence"),
        f"├─ starts from: {base}",
        f"└─ teacher: {model('grpo')}",
        f"   └─ {named('grpo', 'policy')}",
        f"      ├─ starts from: {model('sft')}",
        f"      │  └─ {named('sft', 'sft')}",
        f"      │     ├─ starts from: {base}",
        f"      │     └─ reads: {pipeline.name}/rows.jsonl, SHA-256 {rows}",
        f"      └─ reward model: {model('reward')}",
        f"         └─ {named('reward', 'reward')}",
        f"            ├─ starts from: {model('sft')}",
        f"            │  └─ {named('sft', 'sft')}, as above",
        f"            └─ reads: {pipeline.name}/pairs.jsonl, SHA-256 {pairs}",
        f"               └─ {named('sft', 'sft')}, as above",
    ]


def test_what_is_gone_changed_or_another_one_is_said(pipeline):
    (pipeline / "grpo" / "model" / "model.safetensors").write_bytes(b"other")
    make_run(pipeline / "later", "sft", pretrain=str(pipeline / "grpo" / "model"))
    assert any(line.endswith(", changed since its run") for line in chain_of(pipeline / "later"))
    shutil.rmtree(pipeline / "reward")
    assert any(line.endswith(", its folder is gone") for line in chain_of(pipeline / "student"))
    shutil.rmtree(pipeline / "sft")
    make_run(pipeline / "sft", "prefer", pretrain=str(pipeline / "untrained"))
    lines = chain_of(pipeline / "student")
    assert any(line.endswith(", another run is in its folder now") for line in lines)


def test_a_run_that_names_itself_ends(tmp_path):
    run = {"path": str(tmp_path), "run_sha256": "a" * 64, "stage": "sft", "is_unchanged": True}
    models = {"pretrain": {"path": "m", "run": run}}
    write_start(tmp_path / START_FILE, world_size=1, models=models, run_sha256="a" * 64)
    assert chain_of(tmp_path)[-1].endswith(", as above")


def test_fingerprints_follow_names_sizes_and_contents(tmp_path):
    file = tmp_path / "model.safetensors"
    assert fingerprint(tmp_path) == ""
    found = set()
    for content in (b"", b"a", b"b", b"ab", b"ba"):
        file.write_bytes(content)
        found.add(fingerprint(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    found.add(fingerprint(tmp_path))
    file.rename(tmp_path / "other.safetensors")
    found.add(fingerprint(tmp_path))
    assert len(found) == 6
    large = tmp_path / "other.safetensors"
    size = 80 << 20
    with large.open("wb") as stream:
        stream.truncate(size)
    before = fingerprint(tmp_path)
    for place in (0, size // 2 // 63 * 63, size - 1):
        with large.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"\1")
        if place in (0, size - 1):
            assert fingerprint(tmp_path) != before
        before = fingerprint(tmp_path)


def test_a_hash_of_a_run_follows_options_data_and_models():
    inputs, models = {"a": {"sha256": "1", "modified_ns": 5}}, {"pretrain": {"weights_sha256": "2"}}
    known = run_hash("c", inputs, models)
    assert known == run_hash("c", {"a": {"sha256": "1", "modified_ns": 6}}, models)
    others = [
        run_hash("d", inputs, models),
        run_hash("c", {"a": {"sha256": "9"}}, models),
        run_hash("c", inputs, {"pretrain": {"weights_sha256": "9"}}),
        run_hash("c", inputs, {"pretrain": {"path": "owner/name"}}),
        run_hash("c", inputs, {"pretrain": {"weights_sha256": "2", "tokenizer_sha256": "3"}}),
    ]
    assert len({known, *others}) == 6


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "vocab.json", "chat_template.jinja", "preprocessor_config.json"]
)
def test_other_files_of_a_tokenizer_give_another_hash(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(b"w")
    (tmp_path / "additional_chat_templates").mkdir()
    config, found = TrainConfig(pretrain=str(tmp_path)), set()
    for content in (None, "{}", "{ }"):
        if content is not None:
            (tmp_path / name).write_text(content)
        models = describe_models(config)
        assert models["pretrain"]["weights_sha256"] == fingerprint(tmp_path)
        found.add((models["pretrain"]["tokenizer_sha256"], run_hash("c", {}, models)))
    (tmp_path / "trainer_state.json").write_text("{}")
    found.add((describe_models(config)["pretrain"]["tokenizer_sha256"], run_hash("c", {}, models)))
    assert len({tokens for tokens, _ in found}) == len({run for _, run in found}) == 3


@pytest.mark.full
def test_runs_of_the_command_line_name_each_other(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "tiny", "tiny-qwen3")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    argv = ["sft", "--fsdp", "--prompt_data", "rows.jsonl", "--train_batch_size", "2"]
    argv += ["--micro_train_batch_size", "2", "--actor_learning_rate", "1e-3"]
    assert main([*argv, "--pretrain", "tiny", "--output_dir", "first"]) == 0
    assert main([*argv, "--pretrain", "first/model", "--output_dir", "second"]) == 0
    start = read_json(tmp_path / "second" / START_FILE)
    entry = start["models"]["pretrain"]
    assert entry["weights_sha256"] == fingerprint(tmp_path / "first" / "model")
    assert entry["run"]["is_unchanged"] is True
    assert entry["run"]["run_sha256"] == read_json(tmp_path / "first" / START_FILE)["run_sha256"]
    assert main(["report", "second"]) == 0
    page = (tmp_path / "second" / "report.html").read_text()
    for line in chain_of(tmp_path / "second"):
        assert line in page
    assert f"first (sft, {digits(tmp_path / 'first')})" in page
    capsys.readouterr()
    assert json.loads((tmp_path / "first/model/provenance.json").read_text())["stage"] == "sft"

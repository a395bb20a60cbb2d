"""Log-probabilities of the reference from a file: the same run to the bit, and only the same."""

from __future__ import annotations

import json
import shutil

import pytest
from tests.ranks import run_multiprocess
from tests.runs import digest, steps
from tests.stages.preference.test_preference_runs import options, write_pairs

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.files import FileError
from lightrft.models import Actor
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer import PreferenceTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "model"
    write_tiny_model(path, "tiny-qwen3", seed=1)
    return str(path)


@pytest.fixture
def rows(tmp_path):
    return write_pairs(tmp_path, "rows")


def train(model, rows, folder, **changes):
    given = {"max_epochs": 1, **changes}
    return PreferenceTrainer(TrainConfig(**options(model, rows, folder, **given))).train()


def test_three_ways_are_one_run_and_a_read_file_needs_no_reference(
    tmp_path, model, rows, monkeypatch, capsys
):
    held_out = write_pairs(tmp_path, "held_out", start=8)
    path = tmp_path / "kept" / "reference.json"
    loaded, original = [], Actor.from_pretrained.__func__

    def counted(cls, *arguments, **keywords):
        loaded.append(arguments)
        return original(cls, *arguments, **keywords)

    monkeypatch.setattr(Actor, "from_pretrained", classmethod(counted))
    found, counts = [], []
    for name, more in (
        ("on_the_way", {}),
        ("computed", {"ref_logprobs": str(path)}),
        ("read", {"ref_logprobs": str(path)}),
    ):
        loaded.clear()
        train(model, rows, tmp_path / name, eval_data=held_out, **more)
        counts.append(len(loaded))
        found.append((steps(tmp_path / name), digest(tmp_path / name)))
    assert found[0] == found[1] == found[2]
    assert counts[2] == counts[1] - 1
    said = capsys.readouterr().out
    assert "were written to" in said
    assert "were read from" in said


def damaged(path):
    text = path.read_text()
    place = text.index("-", text.index('"trained"')) + 1
    path.write_text(text[:place] + str(9 - int(text[place])) + text[place + 1 :])
    return FileError, "does not match its own SHA-256"


def cut(path):
    path.write_text(path.read_text()[:-40])
    return FileError, "reference.json"


def of_other_data(path):
    rows = path.with_name("rows.jsonl")
    rows.write_text(rows.read_text().replace("yes 0", "yes 1"))
    return ConfigError, "was computed with another data"


def of_other_template(path):
    return ConfigError, "was computed with another template"


def of_another_model(path):
    return ConfigError, "was computed with another model"


@pytest.mark.parametrize(
    "change", [damaged, cut, of_other_data, of_other_template, of_another_model]
)
def test_what_does_not_fit_is_one_line_and_is_kept(tmp_path, model, rows, change):
    path = tmp_path / "reference.json"
    train(model, rows, tmp_path / "first", ref_logprobs=str(path), max_steps=1)
    error, said = change(path)
    before = path.read_bytes()
    if change is of_other_template:
        shutil.copytree(model, tmp_path / "other")
        (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
        model = str(tmp_path / "other")
    if change is of_another_model:
        write_tiny_model(tmp_path / "other", "tiny-qwen3", seed=2)
        model = str(tmp_path / "other")
    with pytest.raises(error, match=said) as caught:
        train(model, rows, tmp_path / "second", ref_logprobs=str(path), max_steps=1)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert not (tmp_path / "second" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("loss", "said"),
    [("kto", "scores answers to other prompts"), ("simpo", "has no reference")],
)
def test_losses_that_cannot_use_it_refuse_it(tmp_path, model, rows, loss, said):
    with pytest.raises(ConfigError, match=said):
        train(model, rows, tmp_path / "run", ref_logprobs="file", preference_loss=(loss,))


def in_ranks(rank, world_size, settings):
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    return PreferenceTrainer(TrainConfig(**settings)).train().last_metrics


@pytest.mark.full
@pytest.mark.multiprocess
def test_two_ranks_write_what_one_reads(tmp_path, model, rows):
    """The rows of a rank are its own; nine answers do not share out evenly."""
    with (tmp_path / "rows.jsonl").open("a") as stream:
        stream.write(json.dumps({"prompt": "last: ", "chosen": "yes", "rejected": "no no"}) + "\n")
    path = tmp_path / "reference.json"
    given = {"ref_logprobs": str(path), "max_steps": 1, "fsdp": True}
    settings = options(model, rows, tmp_path / "two", **given)
    two = run_multiprocess(in_ranks, 2, timeout_seconds=300, args=(settings,))
    one = train(model, rows, tmp_path / "one", **given).last_metrics
    assert two[0]["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert one["loss"] == pytest.approx(0.6931471805599453, abs=1e-6)

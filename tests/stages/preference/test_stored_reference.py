"""Log-probabilities of the reference from a file: the same run to the bit, and only the same."""

import json
import shutil
from functools import partial

import pytest
from tests.runs import digest, steps, train_on_ranks
from tests.stages.row_stages import options, run, write_rows

from lightrft.config import ConfigError
from lightrft.config.files import FileError
from lightrft.models import Actor

train = partial(run, "prefer")


@pytest.mark.full
def test_three_ways_are_one_run_and_a_read_file_needs_no_reference(
    tmp_path, models, monkeypatch, capsys
):
    rows, held_out = write_rows(tmp_path), write_rows(tmp_path, "held_out", start=8)
    path = tmp_path / "kept/reference.json"
    loaded, original = [], Actor.from_pretrained.__func__

    def counted(cls, *arguments, **keywords):
        loaded.append(arguments)
        return original(cls, *arguments, **keywords)

    monkeypatch.setattr(Actor, "from_pretrained", classmethod(counted))
    ends, counts = [], []
    for name in ("on_the_way", "computed", "read"):
        loaded.clear()
        more = {} if name == "on_the_way" else {"ref_logprobs": str(path)}
        train(models, rows, tmp_path / name, eval_data=held_out, max_epochs=1, **more)
        counts.append(len(loaded))
        ends.append((steps(tmp_path / name), digest(tmp_path / name)))
    assert ends[0] == ends[1] == ends[2]
    assert counts[2] == counts[1] - 1
    said = capsys.readouterr().out
    assert "were written to" in said
    assert "were read from" in said


def damage(path, model):
    text = path.read_text()
    place = text.index("-", text.index('"trained"')) + 1
    path.write_text(text[:place] + str(9 - int(text[place])) + text[place + 1 :])


def cut(path, model):
    path.write_text(path.read_text()[:-40])


def change_data(path, model):
    rows = path.with_name("rows.jsonl")
    rows.write_text(rows.read_text().replace("yes 0", "yes 1"))


def change_template(path, model):
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def change_model(path, model):
    shutil.copy(model.with_name("teacher") / "model.safetensors", model)


@pytest.mark.parametrize(
    "change, error, said",
    [
        (damage, FileError, "does not match its own SHA-256"),
        (cut, FileError, "reference.json"),
        (change_data, ConfigError, "was computed with another data"),
        (change_template, ConfigError, "was computed with another template"),
        (change_model, ConfigError, "was computed with another model"),
    ],
)
def test_what_does_not_fit_is_one_line_and_is_kept(tmp_path, models, change, error, said):
    for name in ("student", "teacher"):
        shutil.copytree(models / name, tmp_path / name)
    rows, path = write_rows(tmp_path), tmp_path / "reference.json"
    changes = {"ref_logprobs": str(path), "max_steps": 1}
    train(tmp_path, rows, tmp_path / "first", **changes)
    change(path, tmp_path / "student")
    before = path.read_bytes()
    with pytest.raises(error, match=said) as caught:
        train(tmp_path, rows, tmp_path / "second", **changes)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert not (tmp_path / "second/metrics.jsonl").exists()


@pytest.mark.parametrize(
    "loss, said", [("kto", "scores answers to other prompts"), ("simpo", "has no reference")]
)
def test_losses_that_cannot_use_it_refuse_it(tmp_path, models, loss, said):
    with pytest.raises(ConfigError, match=said):
        changes = {"ref_logprobs": "file", "preference_loss": (loss,)}
        train(models, write_rows(tmp_path), tmp_path / "run", **changes)


@pytest.mark.full
def test_two_ranks_write_what_one_reads(tmp_path, models):
    """The rows of a rank are its own; nine answers do not share out evenly."""
    rows = write_rows(tmp_path)
    with (tmp_path / "rows.jsonl").open("a") as stream:
        stream.write(json.dumps({"prompt": "last: ", "chosen": "yes", "rejected": "no no"}) + "\n")
    changes = {"ref_logprobs": str(tmp_path / "reference.json"), "max_steps": 1, "fsdp": True}
    settings = options("prefer", models, rows, tmp_path / "two", **changes)
    ((two,), _) = train_on_ranks(2, [{**settings, "stage": "prefer"}])
    one = train(models, rows, tmp_path / "one", **changes).last_metrics
    assert two["last_metrics"]["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert one["loss"] == pytest.approx(0.6931471805599453, abs=1e-6)

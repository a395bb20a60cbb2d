"""Data sets by name, from the cache of a machine without network, and saved folders."""

import pytest
from tests.datasets.row_files import inputs

from lightrft.config.other_names import said_once
from lightrft.datasets import DataError, load_prompts, read_rows

datasets = pytest.importorskip("datasets", reason="package datasets is not installed")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache with one data set, as a download of `owner/sums` leaves it."""
    folder = tmp_path_factory.mktemp("hub")
    source = folder / "sums"
    source.mkdir()
    (source / "train.jsonl").write_text('{"input": "one", "label": 1}\n{"input": "two"}\n')
    (source / "test.jsonl").write_text('{"input": "three", "label": 3}\n')
    datasets.load_dataset(str(source), cache_dir=str(folder / "cache"))
    (folder / "cache/sums").rename(folder / "cache/owner___sums")
    return folder / "cache"


@pytest.fixture(autouse=True)
def use_cache(cache, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


def test_a_name_finds_its_split_and_configuration(tokenizer):
    assert inputs("owner/sums") == ["one", "two"]
    assert read_rows("owner/sums")[1].location == "owner/sums[train], row 2"
    assert [row.columns["label"] for row in read_rows("owner/sums:default", split="test")] == [3]
    assert len(read_rows("owner/sums", split="train[:1]")) == 1
    prompts = load_prompts("owner/sums", tokenizer, split="test")
    assert [(prompt.text, prompt.label) for prompt in prompts] == [("three", "3")]


@pytest.mark.parametrize(
    "name, split, what",
    [
        ("owner/none", "train", "owner/none"),
        ("owner/sums", "validation", "validation"),
        ("owner/sums:other", "train", "other"),
    ],
)
def test_what_the_cache_does_not_hold_is_one_line_with_a_remedy(name, split, what):
    with pytest.raises(DataError, match=r"cannot be loaded: .*HF_HOME") as caught:
        read_rows(name, split=split)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_saved_folder_is_read_whole_or_by_split(tmp_path):
    table = datasets.Dataset.from_list([{"input": "one"}, {"input": "two"}])
    table.save_to_disk(tmp_path / "whole")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "d")
    assert inputs(tmp_path / "whole") == ["one", "two"]
    assert inputs(tmp_path / "d", split="test") == ["two"]
    with pytest.raises(DataError, match=r"no split 'dev': found train, test"):
        read_rows(tmp_path / "d", split="dev")


def test_a_local_path_is_never_looked_up_by_name(tmp_path):
    (tmp_path / "owner").mkdir()
    with pytest.raises(DataError, match="does not exist"):
        read_rows("owner/sums")


def test_a_look_into_the_hub_is_said_before_it_takes_its_time(capsys, monkeypatch):
    said_once.cache_clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for _ in range(2):
        with pytest.raises(DataError, match="cannot be loaded"):
            read_rows("nobody/nothing")
    said = "lightrft: looking for nobody/nothing in the hub and its cache\n"
    assert capsys.readouterr().err.count(said) == 1

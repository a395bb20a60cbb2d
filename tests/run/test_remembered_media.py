"""Media that did not change are not read again at the next start, and all others are."""

import json
import os
from pathlib import Path

import pytest
from tests.datasets.media_files import encoded, picture
from tests.models.vision.tiny_families import write_tiny_vision_model

from lightrft.config import TrainConfig
from lightrft.datasets.types import DataError
from lightrft.engines.media.files import FileFactsByPath, MediaError, facts_of_file, keeping
from lightrft.engines.media.sources import ImageSource
from lightrft.run.assembly import run_training
from lightrft.run.resume import remembered_media

PLANTED = "0" * 64
DATA = TrainConfig(prompt_data="a.jsonl")


def source(path):
    return ImageSource(str(path), path=path)


@pytest.fixture
def shown(tmp_path):
    """A picture, as files have it."""
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture(84, 56)))
    return path


@pytest.fixture
def verdicts(shown):
    """Of the picture; the hash is none that reading gives."""
    found = FileFactsByPath({}, settled_seconds=-1)
    with keeping(found):
        assert source(shown).whole_size() == (84, 56)
    found.by_path[str(shown)].sha256 = PLANTED
    return found


def rewritten(path, content):
    """Another file of the same length and time, as copying with times kept leaves it."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def replaced(path, content):
    other = path.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


def linked(path, content):
    other = path.with_name("other")
    other.write_bytes(content)
    path.unlink()
    path.symlink_to(other)


def test_a_file_that_did_not_change_is_not_read_again(shown, verdicts):
    with keeping(verdicts):
        assert source(shown).digest == PLANTED
        assert source(shown).whole_size() == (84, 56)
    assert source(shown).digest != PLANTED


@pytest.mark.parametrize("change", [rewritten, replaced, linked])
def test_a_changed_file_is_read_again_whatever_its_length_and_time(shown, verdicts, change):
    half = len(shown.read_bytes()) // 2
    change(shown, shown.read_bytes()[:-half] + bytes(half))
    with keeping(verdicts):
        assert source(shown).digest == source(shown).digest != PLANTED
        with pytest.raises(MediaError):
            source(shown).whole_size()


def test_a_file_that_is_gone_is_an_error(shown, verdicts):
    shown.unlink()
    with keeping(verdicts), pytest.raises(MediaError, match="cannot be read"):
        source(shown).whole_size()


def test_a_young_file_is_not_kept(shown):
    found = FileFactsByPath({}, settled_seconds=1e6)
    with keeping(found):
        assert len(source(shown).digest) == 64
    assert found.by_path == {}


# ---- between runs ----


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/lightrft/media"


def remembered(config, shown):
    """The verdicts of a start, during which the picture is hashed."""
    with remembered_media(config, writes=True, settled_seconds=-1):
        before = facts_of_file(shown).sha256
        assert source(shown).digest
    return before


def kept(cache, shown):
    """The file of a run's verdicts."""
    remembered(DATA, shown)
    (file,) = cache.iterdir()
    return file


def test_the_next_run_of_the_same_data_knows_the_hash(cache, shown):
    assert not remembered(DATA, shown)
    assert remembered(DATA, shown) == source(shown).digest
    assert not remembered(TrainConfig(prompt_data="b.jsonl"), shown)
    assert len([*cache.iterdir()]) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"files": {}, "sha256": "0"}'])
def test_a_damaged_file_is_written_anew(cache, shown, content):
    file = kept(cache, shown)
    file.write_bytes(content)
    assert not remembered(DATA, shown)
    assert remembered(DATA, shown)


def test_a_hash_that_was_edited_is_not_believed(cache, shown):
    file = kept(cache, shown)
    file.write_text(file.read_text().replace(source(shown).digest, PLANTED))
    assert not remembered(DATA, shown)


def test_without_a_place_to_write_nothing_is_remembered(cache, shown):
    cache.parent.parent.write_text("a file")
    assert not remembered(TrainConfig(), shown)


def test_a_start_that_fails_leaves_what_it_found_and_other_ranks_write_nothing(cache, shown):
    for writes in (False, True):
        assert not cache.exists()
        with (
            pytest.raises(DataError),
            remembered_media(DATA, writes=writes, settled_seconds=-1),
        ):
            assert source(shown).digest
            raise DataError("row 2")
    assert remembered(DATA, shown)


def test_a_run_looks_at_what_is_remembered(cache, shown, tmp_path):
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    write_tiny_vision_model(model, "tiny-qwen2.5-vl")
    data.write_text(json.dumps({"input": "<image>What?", "images": [str(shown)]}) + "\n")
    config = TrainConfig(
        pretrain=str(model),
        prompt_data=str(data),
        apply_chat_template=True,
        label_key=None,
        reward_fn=("length",),
        engine_type="hf",
        output_dir=str(tmp_path / "run"),
    )
    remembered(config, shown)
    with remembered_media(config, writes=True):
        # No processor takes a picture of this shape.
        facts_of_file(Path(shown)).size = (30_000, 10)
    with pytest.raises(DataError, match="aspect ratio"):
        run_training(config)

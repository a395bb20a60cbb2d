"""Checkpoint folders: atomic, verified, rotated only among their own kind."""

import json
import random
import shutil
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.ranks import run_multiprocess

from lightrft.config.files import sealed
from lightrft.strategy.checkpoints.files import FileWriter, load_state, save_state
from lightrft.strategy.checkpoints.folders import (
    SaveRequest,
    find_checkpoint,
    find_checkpoints,
    write_checkpoint,
)
from lightrft.strategy.checkpoints.manifest import MANIFEST_NAME, list_checkpoints
from lightrft.strategy.distributed.collectives import barrier
from lightrft.strategy.distributed.process_end import CheckpointError
from lightrft.strategy.distributed.process_groups import start_process_group


def save(folder, tag=None, *, num_bytes=10, **options):
    request = SaveRequest(save_dir=folder, strategy="Test", tag=tag, **options)
    return write_checkpoint(
        request, lambda path, _: (path / "weights.bin").write_bytes(bytes(num_bytes)) and None
    )


def tags(folder):
    return [item.manifest.tag for item in list_checkpoints(folder)]


def test_rotation_by_number_keeps_the_newest(tmp_path):
    for step in range(5):
        save(tmp_path, f"s{step}", max_num=3)
    assert tags(tmp_path) == ["s2", "s3", "s4"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "s2", "s3", "s4"]


def test_rotation_by_size_counts_megabytes(tmp_path):
    for step in range(4):
        save(tmp_path, f"s{step}", max_num=10, max_mem=1.2, num_bytes=500_000)
    assert tags(tmp_path) == ["s2", "s3"]


def test_the_newest_is_kept_even_when_it_alone_is_too_large(tmp_path, caplog):
    save(tmp_path, "small", max_mem=0.1)
    save(tmp_path, "large", max_mem=0.1, num_bytes=200_000)
    assert tags(tmp_path) == ["large"]
    assert "max_mem = 0.1 MB" in caplog.text


def test_foreign_folders_are_never_deleted_nor_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    for step in range(3):
        save(tmp_path, f"s{step}", max_num=1)
    assert (tmp_path / "mine/notes.txt").read_text() == "keep"
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        save(tmp_path, "mine")
    assert (tmp_path / "mine/notes.txt").read_text() == "keep"


@pytest.mark.parametrize("options", [{"max_num": 0}, {"max_num": -1}, {"max_mem": 0}])
def test_limits_that_keep_nothing_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="max_"):
        save(tmp_path, "a", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tag", ["a/b", "..", "latest", ".hidden", ""])
def test_tags_that_are_no_plain_folder_name_are_refused(tmp_path, tag):
    with pytest.raises(ValueError, match="tag"):
        save(tmp_path, tag)


def test_without_a_tag_the_global_step_or_a_counter_names_the_folder(tmp_path):
    assert save(tmp_path, client_state={"global_step": 7}).path.name == "global_step7"
    assert save(tmp_path).path.name == "step2"


def test_a_failed_save_changes_nothing(tmp_path):
    save(tmp_path, "good", max_num=1)

    def fail(path, _):
        (path / "half.bin").write_bytes(b"x")
        raise OSError("disk full")

    with pytest.raises(CheckpointError, match="rank 0: OSError: disk full"):
        write_checkpoint(SaveRequest(save_dir=tmp_path, strategy="Test", tag="bad"), fail)
    assert tags(tmp_path) == ["good"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "latest"]


def test_a_save_that_was_killed_leaves_the_previous_one(tmp_path):
    save(tmp_path, "good")
    killed = tmp_path / ".lightrft-tmp-next-nohost-1"
    killed.mkdir()
    (killed / "weights.bin").write_bytes(b"half")
    (tmp_path / "latest").write_text("next\n")  # killed between the pointer and the rename
    assert find_checkpoint(tmp_path).manifest.tag == "good"


def test_a_kill_while_a_tag_is_replaced_leaves_the_old_one(tmp_path):
    save(tmp_path, "best")
    (tmp_path / "best").rename(tmp_path / ".lightrft-old-best")
    assert find_checkpoint(tmp_path, "best").manifest.order == 1
    save(tmp_path, "best", num_bytes=20)
    assert find_checkpoint(tmp_path, "best").manifest.order == 2
    assert (tmp_path / "best/weights.bin").stat().st_size == 20
    assert not (tmp_path / ".lightrft-old-best").exists() or tags(tmp_path) == ["best"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path, damage, caplog):
    save(tmp_path, "old")
    newest = save(tmp_path, "new", num_bytes=100).path
    weights = newest / "weights.bin"
    if damage == "truncate":
        weights.write_bytes(bytes(99))
    elif damage == "flip":
        weights.write_bytes(bytes(99) + b"\1")
    elif damage == "remove":
        weights.unlink()
    else:
        (newest / MANIFEST_NAME).write_text('{"format": "other"}')
    assert find_checkpoint(tmp_path).manifest.tag == "old"
    assert "skipping" in caplog.text
    with pytest.raises((CheckpointError, FileNotFoundError)):
        find_checkpoint(tmp_path, "new")


def rewrite_manifest(path, **changes):
    """Other values in a manifest that vouches for itself."""
    values = json.loads((path / MANIFEST_NAME).read_text()) | changes
    # Private: a damaged manifest with a digest that is right.
    (path / MANIFEST_NAME).write_text(sealed(values))


@pytest.mark.parametrize("tag", ["old", "new"])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 200_000, b"9" * 5001, b"{}", b"", None])
def test_a_bad_manifest_blocks_neither_loading_nor_saving(tmp_path, tag, content):
    for name in ("old", "new"):
        save(tmp_path, name)
    manifest = tmp_path / tag / MANIFEST_NAME
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content)
    left = {"old": "new", "new": "old"}[tag]
    assert find_checkpoint(tmp_path).manifest.tag == left
    # The damaged one is replaced when its step is saved again.
    assert save(tmp_path, tag).manifest.order > find_checkpoint(tmp_path, left).manifest.order
    assert find_checkpoint(tmp_path).manifest.tag == tag


def test_a_folder_in_the_place_of_the_pointer_does_not_block_saving(tmp_path):
    save(tmp_path, "old")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest/deep").mkdir(parents=True)
    assert find_checkpoint(tmp_path).manifest.tag == "old"
    save(tmp_path, "new")
    assert (tmp_path / "latest").read_text() == "new\n"


def test_checkpoints_whose_first_folder_is_gone_are_named(tmp_path):
    save(tmp_path / "critic", "old")
    with pytest.raises(CheckpointError, match="actor/old is missing or damaged"):
        find_checkpoints([tmp_path / "actor", tmp_path / "critic"])


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside", ".", "", "a\0b"])
def test_paths_lead_nowhere_else_even_where_the_hash_is_right(tmp_path, path):
    folder = save(tmp_path, "a").path
    (tmp_path / "outside").write_bytes(bytes(10))
    entry = json.loads((folder / MANIFEST_NAME).read_text())["files"][-1]
    rewrite_manifest(folder, files=[{**entry, "path": path}])
    with pytest.raises(CheckpointError, match=r"a: manifest\.json: not a checkpoint manifest"):
        find_checkpoint(tmp_path)


def test_a_link_out_of_the_checkpoint_is_damage(tmp_path):
    folder = save(tmp_path, "a").path
    (folder / "weights.bin").rename(tmp_path / "elsewhere")
    (folder / "weights.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"weights\.bin is a link out of its folder"):
        find_checkpoint(tmp_path)


def test_a_copy_under_another_name_is_nobodys_checkpoint(tmp_path, caplog):
    for step in range(3):
        save(tmp_path, f"s{step}", max_num=3)
    shutil.copytree(tmp_path / "s0", tmp_path / "backup")
    save(tmp_path, "s3", max_num=1)
    assert tags(tmp_path) == ["s3"]
    assert (tmp_path / "backup/weights.bin").exists()
    assert "backup: manifest.json is that of 's0'" in caplog.text


def test_the_newest_step_of_which_all_folders_are_whole_is_taken(tmp_path):
    folders = [tmp_path / "actor", tmp_path / "critic"]
    for step in (1, 2, 3):
        for folder in reversed(folders):
            save(folder, f"s{step}")
    (folders[1] / "s3/weights.bin").write_bytes(b"x")
    (folders[0] / "s2" / MANIFEST_NAME).write_bytes(b"\xff")
    assert [found.path.name for found in find_checkpoints(folders)] == ["s1", "s1"]
    shutil.rmtree(folders[1] / "s1")
    with pytest.raises(CheckpointError) as caught:
        find_checkpoints(folders)
    for text in ("critic/s3: weights.bin has 1 bytes", "actor/s2: manifest.json", "critic/s1 is"):
        assert text in str(caught.value)
    with pytest.raises(FileNotFoundError):
        find_checkpoints([tmp_path / "nowhere"])


def test_latest_is_what_save_latest_says_and_a_tag_wins(tmp_path):
    save(tmp_path, "a")
    save(tmp_path, "b")
    save(tmp_path, "side", save_latest=False)
    assert find_checkpoint(tmp_path).manifest.tag == "b"
    assert find_checkpoint(tmp_path, "a").manifest.tag == "a"
    # The pointer is for people: a byte of it must not choose an older step.
    (tmp_path / "latest").write_text("a\n")
    assert find_checkpoint(tmp_path).manifest.tag == "b"
    with pytest.raises(FileNotFoundError, match="found \\['a', 'b', 'side'\\]"):
        find_checkpoint(tmp_path, "c")


def save_where_one_rank_fails(rank, world_size, folder):
    start_process_group(timedelta(seconds=120))

    def write(path, files):
        if rank == 1:
            raise OSError("planted")

    with pytest.raises(CheckpointError, match=r"^rank 1: OSError: planted$"):
        write_checkpoint(SaveRequest(folder, tag="a"), write, group=None)
    barrier()
    return [path.name for path in folder.iterdir()]


@pytest.mark.full
def test_one_failing_rank_is_named_on_every_rank_and_nothing_is_left(tmp_path):
    assert run_multiprocess(save_where_one_rank_fails, 2, args=(tmp_path,)) == [[], []]


def test_client_state_keeps_types_and_values(tmp_path):
    state = {
        "global_step": 3,
        "nested": {"pair": (1, 2.5), "list": [None, True, "x"], "inf": float("inf")},
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "array": np.arange(4, dtype=np.uint32),
        "scalar": np.float64(0.1),
    }
    checkpoint = save(tmp_path, "a", client_state=state)
    loaded = find_checkpoint(tmp_path).client_state()
    assert checkpoint.path == tmp_path / "a"
    assert loaded["nested"] == state["nested"]
    assert loaded["scalar"] == 0.1
    assert torch.equal(loaded["tensor"], state["tensor"])
    assert loaded["tensor"].dtype == torch.bfloat16
    assert np.array_equal(loaded["array"], state["array"])
    assert loaded["array"].dtype == np.uint32


def test_client_state_refuses_objects_that_would_need_pickle(tmp_path):
    with pytest.raises(TypeError, match=r"PosixPath at state\.a\[1\]"):
        save_state(tmp_path / "s", {"a": [1, Path("x")]}, FileWriter())
    with pytest.raises(TypeError, match="string keys"):
        save_state(tmp_path / "s", {"a": {1: 2}}, FileWriter())


def test_files_hold_no_pickle(tmp_path):
    path = save(tmp_path, "a", client_state={"t": torch.ones(2)}).path
    suffixes = {p.suffix for p in path.rglob("*") if p.is_file()}
    assert suffixes == {".bin", ".json", ".safetensors"}
    assert json.loads((path / MANIFEST_NAME).read_text())["format"] == "lightrft-checkpoint"
    assert load_state(path / "rng/rank_00000").keys() >= {"python", "numpy", "torch"}


def test_generators_continue_where_they_were_saved(tmp_path):
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    save(tmp_path, "a")
    expected = draw()
    assert draw() != expected
    assert find_checkpoint(tmp_path).restore_rng(0)
    assert draw() == expected
    assert not find_checkpoint(tmp_path).restore_rng(1)

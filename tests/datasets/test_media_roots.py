"""Files that rows name lie in the folder of their data, or in one that an option names."""

import hashlib
from pathlib import Path

import pytest
from tests.datasets.film_files import film
from tests.datasets.media_files import picture
from tests.datasets.row_files import prompts_of, written
from tests.models.vision.tiny_world import tiny

from lightrft.config import TrainConfig
from lightrft.datasets.files import read_rows
from lightrft.datasets.media import TextModality, VisionPrompts
from lightrft.datasets.prompts import load_prompts
from lightrft.datasets.types import DataError

CONFIG = TrainConfig(apply_chat_template=True, prompt_max_len=2000)


@pytest.fixture(scope="module")
def reader():
    return VisionPrompts(tiny("tiny-qwen3-vl")[1])


@pytest.fixture
def world(tmp_path):
    """A folder of data, and beside it one with a picture and a film that are nobody's."""
    for name in ("data", "other"):
        (tmp_path / name).mkdir()
        picture(32, 32).save(tmp_path / name / "a.png")
        (tmp_path / name / "a.mp4").write_bytes(film("mp4", num_frames=2))
    (tmp_path / "data/link.png").symlink_to(tmp_path / "other/a.png")
    (tmp_path / "data/folder").symlink_to(tmp_path / "other")
    (tmp_path / "data/within.png").symlink_to("a.png")
    return tmp_path


def load(folder, row, reader, **options):
    return prompts_of(CONFIG, folder, [{"input": "?"} | row], reader, **options)


def asked(**part):
    text = {"type": "text", "text": "?"}
    return {"input": [{"role": "user", "content": [part, text]}]}


def outside(world):
    path = str(world / "other/a.png")
    return {
        "absolute": {"images": path},
        "up": {"images": "../other/a.png"},
        "down and up": {"images": "folder/../other/a.png"},
        "link": {"images": "link.png"},
        "linked folder": {"images": "folder/a.png"},
        "address": {"images": f"file://{path}"},
        "object": {"images": [{"path": path, "bytes": None}]},
        "frame": {"videos": {"frames": ["a.png", path], "fps": 2}},
        "film": {"videos": "../other/a.mp4"},
        "part": asked(type="image", image=path),
        "address in a part": asked(type="image_url", image_url={"url": f"file://{path}"}),
    }


@pytest.mark.parametrize("name", outside(Path()))
def test_a_file_outside_the_folder_of_the_data_is_refused_unless_allowed(name, world, reader):
    row = outside(world)[name]
    with pytest.raises(
        DataError, match=r"train\.jsonl:1: .* is outside of .*--media_root"
    ) as error:
        load(world / "data", row, reader)
    assert "\n" not in str(error.value)
    for root in (world / "other", world, "/"):
        assert load(world / "data", row, reader, media_root=str(root))[0].media


def test_the_rule_holds_where_no_model_is_there(world):
    (row,) = read_rows(written(world / "data", [{"input": "?", "images": "link.png"}]))
    with pytest.raises(DataError, match="is outside of"):
        TextModality(None, has_model=False).read(row, CONFIG)


def test_files_beside_the_data_need_no_option(world, reader):
    data = world / "data"
    for path in ("a.png", "./a.png", "within.png", str(data / "a.png"), f"file://{data / 'a.png'}"):
        assert load(data, {"images": path}, reader)[0].media


def test_a_folder_of_splits_is_the_place_of_its_media(world, reader):
    (world / "data").rename(world / "pictures")
    (world / "data").mkdir()
    written(world / "data", [{"input": "?", "images": "../pictures/a.png"}], "train.jsonl")
    assert load_prompts(world, reader, CONFIG).prompts[0].media
    with pytest.raises(DataError, match="is outside of"):
        load_prompts(world / "data", reader, CONFIG)


def test_a_row_that_names_the_hash_of_a_file_may_lie_elsewhere(world, reader):
    """As `lightrft rows` writes rows with the images of a run."""
    path = world / "other/a.png"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    row = {"images": [str(path)], "images_sha256": [digest]}
    assert load(world / "data", row, reader)[0].media
    with pytest.raises(DataError, match="an image has other bytes than images_sha256 says"):
        load(world / "data", row | {"images_sha256": ["0" * 64]}, reader)

"""Rows of the caller's memory with media, and data sets whose media stay encoded."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image
from tests.datasets.media_files import encoded, picture

from lightrft.config import TrainConfig
from lightrft.datasets.files import Row, encoded_rows, read_rows
from lightrft.datasets.media import column_media
from lightrft.datasets.types import DataError
from lightrft.trainer.inputs_from_python import GivenRows

A, B = picture(84, 84, 1), picture(112, 56, 2)
ADDRESS = f"data:image/png;base64,{base64.b64encode(encoded(A)).decode()}"
CONFIG = TrainConfig()


def kept(folder, rows):
    """The rows as a run reads them."""
    given = GivenRows.of(rows, "prompt", folder / "inputs")
    assert not given.path.exists()
    given.write()
    return read_rows(given.path)


def pixels(row):
    return [image.decode().tobytes() for image in column_media(row, CONFIG).images]


@pytest.mark.parametrize(
    "image",
    [A, np.asarray(A), encoded(A), bytearray(encoded(A)), ADDRESS, {"bytes": encoded(A)}, "a.png"],
    ids=["pillow", "array", "bytes", "bytearray", "address", "object", "path"],
)
def test_pictures_in_memory_are_kept(tmp_path, monkeypatch, image):
    monkeypatch.chdir(tmp_path)
    A.save("a.png")
    (tmp_path / "elsewhere").mkdir()
    rows = [{"input": "?", "images": image}, {"input": "?", "images": [image, B]}]
    alone, both = kept(tmp_path / "elsewhere", rows)
    monkeypatch.chdir("/")
    assert pixels(alone) == [A.tobytes()]
    assert pixels(both) == [A.tobytes(), B.tobytes()]


def test_lists_of_lists_parts_and_further_columns_stay(tmp_path):
    part = {"type": "image", "image": B}
    row = {"images": [[A], [B]], "input": [{"content": [part]}], "k": np.arange(2), "t": (1, "x")}
    (found,) = kept(tmp_path, [row])
    assert pixels(found) == [A.tobytes(), B.tobytes()]
    assert (found.columns["k"], found.columns["t"]) == ([0, 1], [1, "x"])
    name = found.columns["input"][0]["content"][0]["image"]
    assert Image.open(found.folder / name).tobytes() == B.tobytes()


def test_a_column_of_another_name_is_known_by_its_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    A.save("a.png")
    rows = [{"pictures": ["a.png", np.asarray(B)]}]
    given = GivenRows.of(rows, "p", tmp_path / "inputs", ["pictures"])
    given.write()
    monkeypatch.chdir("/")
    (found,) = read_rows(given.path)
    media = column_media(found, CONFIG.replaced({"images_key": "pictures"}))
    assert [image.decode().tobytes() for image in media.images] == [A.tobytes(), B.tobytes()]


def test_sounds_and_frames_in_memory_are_kept(tmp_path):
    samples = np.linspace(-0.5, 0.5, 3200, dtype=np.float32)
    frames = np.stack([np.asarray(A), np.asarray(A)])
    row = {
        "audios": [{"array": samples, "sampling_rate": 16000}],
        "videos": {"frames": frames, "fps": 2},
    }
    (found,) = kept(tmp_path, [row])
    media = column_media(found, CONFIG)
    assert np.abs(media.audios[0].decode()[0] - samples).max() < 1e-6
    assert (media.videos[0].decode()[0] == frames).all()


def test_the_file_is_named_after_the_pixels_too(tmp_path):
    names = {GivenRows.of([{"images": image}], "p", tmp_path).path for image in (A, B, A)}
    assert len(names) == 2


def test_what_is_neither_json_nor_media_is_named(tmp_path):
    with pytest.raises(DataError, match=r"p: row 2: column 'k' cannot be kept as JSON"):
        GivenRows.of([{"k": 1}, {"k": object()}], "p", tmp_path)


def held(values, feature):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"input": datasets.Value("string"), "images": feature(datasets)})
    return datasets.Dataset.from_dict({"input": ["?"], "images": [values]}, features=features)


@pytest.mark.parametrize("is_iterable", [False, True])
@pytest.mark.parametrize("is_list", [False, True])
def test_pictures_of_a_data_set_stay_encoded(tmp_path, is_list, is_iterable):
    """JPEG stays JPEG: decoded and encoded again it would be ten times as large."""
    photo = encoded(A, "JPEG")
    value = {"bytes": photo, "path": None}
    data = held(
        [value, value] if is_list else value,
        lambda datasets: datasets.List(datasets.Image()) if is_list else datasets.Image(),
    )
    (row,) = encoded_rows(data.to_iterable_dataset() if is_iterable else data)
    media = column_media(Row(row, "row 1"), CONFIG)
    assert {image.read() for image in media.images} == {photo}
    (found,) = kept(tmp_path, data)
    expected = Image.open(io.BytesIO(photo)).tobytes()
    assert pixels(found) == [expected] * (2 if is_list else 1)
    (file,) = (tmp_path / "inputs/media").iterdir()
    assert file.read_bytes() == photo


def test_a_data_set_that_is_transformed_gives_what_the_function_makes(tmp_path):
    data = held({"bytes": encoded(A), "path": None}, lambda datasets: datasets.Image())
    data.set_transform(lambda batch: {"input": ["new"], "images": [B]})
    (found,) = kept(tmp_path, data)
    assert found.columns["input"] == "new"
    assert pixels(found) == [B.tobytes()]


def test_saved_data_sets_are_read_encoded(tmp_path):
    photo = encoded(A, "JPEG")
    data = held({"bytes": photo, "path": None}, lambda datasets: datasets.Image())
    data.save_to_disk(tmp_path / "saved")
    (row,) = read_rows(tmp_path / "saved")
    assert column_media(row, CONFIG).images[0].read() == photo
    assert json.dumps(row.columns["input"]) == '"?"'

"""The gate of media: rows of every form times families end right, or in one line."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from tests.datasets.media_files import encoded, picture
from tests.datasets.row_files import prompts_of
from tests.models.vision.tiny_families import TINY_FAMILIES
from tests.models.vision.tiny_world import Batch, prompt, scored, tiny, tower_of

from lightrft.config import TrainConfig
from lightrft.datasets.files import Row
from lightrft.datasets.media import VisionPrompts, as_parts, media_row
from lightrft.datasets.prompts import load_prompts
from lightrft.datasets.types import DataError
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.files import MediaError
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import as_image, as_video
from lightrft.engines.media.text_encoder import TEXT_ENCODER
from lightrft.models import Actor
from lightrft.records.media import media_request
from lightrft.tools.data.row_checks import check_prompts, repeated
from lightrft.tools.model_presets import byte_level_tokenizer

CONFIG = TrainConfig(apply_chat_template=True, prompt_max_len=1000, label_key=None)
A, B = picture(84, 84, 1), picture(112, 56, 2)
BASE64 = base64.b64encode(encoded(A)).decode()
ADDRESS = f"data:image/png;base64,{BASE64}"


# Rows as they stand in a file, and the pictures in the order in which the model must see them.
ROWS = {
    "mark and column": ('{"input": "see <image>?", "images": ["a.png"]}', "a"),
    "column alone": ('{"input": "see", "images": "a.png"}', "a"),
    "other column": ('{"input": "see <image>?", "image": {"path": "a.png"}}', "a"),
    "both columns, one empty": ('{"input": "?", "image": "a.png", "images": []}', "a"),
    "lists of lists": ('{"input": "<image> <image>?", "images": [["b.png"], ["a.png"]]}', "ba"),
    "part": (
        '{"input": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": '
        '"text", "text": "What?"}]}]}',
        "a",
    ),
    "part with nulls": (
        '{"input": [{"role": "user", "content": [{"type": "image", "path": "a.png", "text": '
        'null}, {"type": "text", "text": "?", "path": null}]}]}',
        "a",
    ),
    "part by address": (
        '{"input": [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": '
        '"image", "url": "ADDRESS"}, {"type": "text", "text": "!"}]}]}',
        "a",
    ),
    "part of base64": (
        '{"input": [{"role": "user", "content": [{"type": "image", "base64": "BASE64"}, {"type": '
        '"text", "text": "?"}]}]}',
        "a",
    ),
    "OpenAI": (
        '{"input": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": '
        '"ADDRESS", "detail": "low"}}, {"type": "text", "text": "?"}]}]}',
        "a",
    ),
    "OpenAI, responses": (
        '{"input": [{"role": "user", "content": [{"type": "input_image", "image_url": '
        '"ADDRESS"}, {"type": "input_text", "text": "?"}]}]}',
        "a",
    ),
    "kind by its key": (
        '{"input": [{"role": "user", "content": [{"image": "a.png"}, {"text": "?"}]}]}',
        "a",
    ),
    "parts and columns": (
        '{"input": [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": '
        '"image"}, {"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]}], '
        '"images": ["b.png"]}',
        "ba",
    ),
    "by index": (
        '{"input": [{"role": "user", "content": [{"type": "image", "index": 0}, {"type": '
        '"image", "index": 1}, {"type": "text", "text": "?"}]}], "images": ["b.png", "a.png"]}',
        "ba",
    ),
    "two turns": (
        '{"input": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": '
        '"no"}, {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": '
        '"text", "text": "now?"}]}], "images": ["b.png"]}',
        "ba",
    ),
    "text": ('{"input": "What is 3 + 4?", "images": null}', ""),
    "text in parts": (
        '{"input": [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": '
        '"text", "text": "3 + 4?"}]}]}',
        "",
    ),
}
RIGHT = {
    name: (json.loads(row.replace("ADDRESS", ADDRESS).replace("BASE64", BASE64)), seen)
    for name, (row, seen) in ROWS.items()
}


def load(folder, row, reader, **options):
    A.save(folder / "a.png")
    B.save(folder / "b.png")
    return prompts_of(CONFIG, folder, [{"input": "first"}, row], reader, **options)[1]


def names_of(media):
    pixels = {picture.tobytes(): name for name, picture in (("a", A), ("b", B))}
    return "".join(pixels[image.decode().tobytes()] for image in media.images)


for_every_family = pytest.mark.parametrize("family", TINY_FAMILIES)


@for_every_family
def test_rows_of_every_form_are_read_by_every_family(tmp_path, family):
    _, encoder = tiny(family)
    reader = VisionPrompts(encoder)
    for name, (row, expected) in RIGHT.items():
        found = load(tmp_path, row, reader)
        assert names_of(found.media) == expected, name
        assert found.text.count(encoder.marks["image"]) == len(expected), name
        shown = [part for said in found.messages for part in as_parts(said["content"])]
        assert [part["type"] for part in shown].count("image") == len(expected), name
        if expected:
            assert found.token_ids == encoder.encode(found.text, found.media).token_ids, name


@for_every_family
def test_a_text_holds_no_place_of_the_model_s_own(tmp_path, family):
    _, encoder = tiny(family)
    reader = VisionPrompts(encoder)
    mark = encoder.marks["image"]
    if mark == "<image>":  # these models and data have one mark
        prompt = load(tmp_path, {"input": f"what is {mark} ?", "images": "a.png"}, reader)
        assert names_of(prompt.media) == "a"
        return
    for columns in ({}, {"images": "a.png"}):
        with pytest.raises(DataError, match=r"train.jsonl:2: .* reads as the place of a medium"):
            load(tmp_path, {"input": f"what is {mark} ?", **columns}, reader)


@for_every_family
def test_without_a_chat_template_the_text_has_the_model_s_own_places(tmp_path, family):
    _, encoder = tiny(family)
    reader = VisionPrompts(encoder)
    plain, mark = {"apply_chat_template": False}, encoder.marks["image"]
    found = load(tmp_path, {"input": f"see {mark}!", "images": "a.png"}, reader, **plain)
    assert found.token_ids == encoder.encode(f"see {mark}!", found.media).token_ids
    bad = {
        "no place": {"input": "see", "images": "a.png"},
        "no picture": {"input": f"see {mark}!"},
        "two places": {"input": f"{mark}{mark}!", "images": "a.png"},
    }
    if mark != "<image>":
        bad["mark of data"] = {"input": "<image>?", "images": "a.png"}
    for name, row in bad.items():
        with pytest.raises(DataError, match=r"train.jsonl:2: .*(places|--apply_chat_template)"):
            load(tmp_path, row, reader, **plain)
            pytest.fail(name)


def test_a_prompt_does_not_end_with_a_medium(tmp_path):
    reader = VisionPrompts(tiny("tiny-llava")[1])
    row = {"input": "see <image>", "images": "a.png"}
    with pytest.raises(DataError, match="ends with a medium"):
        load(tmp_path, row, reader, apply_chat_template=False)


@for_every_family
def test_a_picture_moves_the_tower_by_what_it_shows(family):
    model, encoder = tiny(family)
    actor, gradients = Actor(model), []
    for shown in (A, ImageOps.mirror(A)):
        media = Media({"image": [as_image(shown, name="x", folder=None)]})
        batch = Batch(model, encoder, prompts=(encoder.encode(prompt(encoder, "?", 1), media),))
        model.zero_grad()
        scored(actor, batch)[batch.scored].sum().backward()
        tower = [
            weight.grad.flatten()
            for weight in tower_of(model).parameters()
            if weight.grad is not None
        ]
        gradients.append(torch.cat(tower))
    assert (gradients[0] - gradients[1]).norm() > 0.01 * gradients[0].norm() > 0


def test_text_only_leaves_places_out_with_the_media(tmp_path):
    for reader in (VisionPrompts(tiny("tiny-llava")[1]), VisionPrompts(tiny("tiny-qwen2.5-vl")[1])):
        for name in ("mark and column", "parts and columns", "OpenAI"):
            found = load(tmp_path, RIGHT[name][0], reader, text_only=True)
            assert not found.media
            assert "<image>" not in found.text
            assert "pad|" not in found.text
        mark = reader.encoder.marks["image"]
        row = {"input": f"see {mark}!", "images": "none.png"}
        if mark == "<image>":
            assert load(tmp_path, row, reader, text_only=True, apply_chat_template=False).text == (
                "see !"
            )


def test_a_model_of_text_refuses_parts(tmp_path):
    row = Row(RIGHT["part"][0], "rows:1", tmp_path)
    chat = row.columns["input"]
    with pytest.raises(DataError, match=r"rows:1: a message has a part of type 'image'.*text_only"):
        media_row(row, chat, CONFIG, TEXT_ENCODER)
    only = media_row(row, chat, CONFIG.replaced({"text_only": True}), TEXT_ENCODER)
    assert only.content == [{"role": "user", "content": "What?"}]
    # What a model of text reads is its own: `<image>` is a word to it.
    tokenizer = byte_level_tokenizer()
    assert "<image>" in load(tmp_path, {"input": "write <image>"}, tokenizer).text


def test_one_question_about_two_pictures_is_no_duplicate(tmp_path):
    for name, image in (("a.png", A), ("b.png", B)):
        image.save(tmp_path / name)
    rows = [
        Row({"input": "?", "images": name}, f"rows:{i}", tmp_path)
        for i, name in enumerate(("a.png", "b.png", "a.png"), start=1)
    ]
    found = check_prompts(rows, VisionPrompts(tiny("tiny-qwen2.5-vl")[1]), CONFIG)
    assert repeated(found.rows, lambda row: (row.text, *row.media)) == [("rows:3", "rows:1")]


def test_counts_of_parts_are_limited_too(tmp_path):
    reader = VisionPrompts(tiny("tiny-qwen2.5-vl")[1])
    with pytest.raises(DataError, match="2 images, more than --limit_mm_image_per_prompt 1"):
        load(tmp_path, RIGHT["parts and columns"][0], reader, limit_mm_image_per_prompt=1)


def shifted(processor):
    """A processor that loses the last tile or patch."""

    class Shifted:
        def __init__(self):
            vars(self).update(vars(processor))
            if hasattr(processor, "_get_number_of_features"):
                self._get_number_of_features = processor._get_number_of_features

        def __call__(self, **arguments):
            found = processor(**arguments)
            if "image_grid_thw" in found:
                found["image_grid_thw"][-1, 1] -= 2
            else:
                axis = (
                    1 if found["pixel_values"].shape[0] == 1 < found["pixel_values"].ndim - 3 else 0
                )
                found["pixel_values"] = found["pixel_values"].narrow(
                    axis, 0, found["pixel_values"].shape[axis] - 1
                )
                if "image_sizes" in found:
                    found["image_sizes"] = found["image_sizes"] * 0 + 7
            return found

    return Shifted()


@for_every_family
def test_features_are_compared_with_placeholders(family):
    _, encoder = tiny(family)
    own = PromptEncoder(shifted(encoder.processor), encoder.family)
    media = Media({"image": [as_image(A, name="a", folder=None)]})
    asked = prompt(encoder, "?", 1)
    encoder.encode(asked, media)
    with pytest.raises(ValueError, match=r"gave \d+ features and \d+ places for 1 images"):
        own.encode(asked, media)


@for_every_family
def test_tokens_follow_from_the_sizes_of_pictures(family, monkeypatch):
    """Headers alone give the ids that pixels give, whatever the sizes; another size does not."""
    _, encoder = tiny(family)
    sizes = np.random.default_rng(3).integers(20, 400, (12, 2)).tolist()
    counts = [1, 1, 1, 2, 3, 4]
    found = []
    for count in counts:
        given = [as_image(picture(*sizes.pop(), i), name="x", folder=None) for i in range(count)]
        media, asked = Media({"image": given}), prompt(encoder, "How many?", count)
        whole = encoder.encode(asked, media)
        with monkeypatch.context() as patch:
            if family != "tiny-mllama":
                patch.setattr(PromptEncoder, "encode", None)
            tokens = encoder.tokens(asked, media)
        for name in ("token_ids", "request_token_ids", "kinds"):
            assert getattr(tokens, name) == getattr(whole, name)
        found.append(len(tokens.token_ids))
    fixed = ("tiny-gemma3", "tiny-llava", "tiny-mllama")
    assert (len(set(found[:3])) > 1) is (family not in fixed)


def test_what_is_read_by_its_header_is_whole(tmp_path):
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        content = encoded(A, kind)
        whole = as_image(content, name="x", folder=tmp_path)
        assert whole.whole_size() == whole.size() == (84, 84)
        for kept in (len(content) - 1, len(content) // 2):
            cut = as_image(content[:kept], name="x", folder=tmp_path)
            try:
                cut.decode()
            except MediaError:
                with pytest.raises(MediaError):
                    cut.whole_size()
    damaged = bytearray(encoded(A))
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(MediaError, match="damaged image"):
        as_image(bytes(damaged), name="x", folder=tmp_path).whole_size()


def test_a_file_that_changed_since_it_was_read_ends_the_run(tmp_path):
    reader = VisionPrompts(tiny("tiny-qwen2.5-vl")[1])
    found = load(tmp_path, RIGHT["column alone"][0], reader)
    assert media_request(found, 1, reader.encoder).encoded.token_ids == found.token_ids
    reader.encoder.forget()
    picture(56, 28).save(tmp_path / "a.png")
    fresh = load_prompts(tmp_path / "train.jsonl", reader, CONFIG).prompts[1]
    with pytest.raises(ValueError, match="a file has changed"):
        media_request(replace(found, media=fresh.media), 1, reader.encoder)


FORMS = {
    "path": "a.png",
    "path object": lambda folder: folder / "a.png",
    "address": lambda folder: f"file://{folder / 'a.png'}",
    "address of data": ADDRESS,
    "base64": BASE64,
    "bytes": encoded(A),
    "object with a path": {"path": "a.png"},
    "object with an image": {"image": "a.png"},
    "of Pillow": A,
    "bytearray": bytearray(encoded(A)),
    "memoryview": memoryview(encoded(A)),
    "list of integers": list(encoded(A)),
    "array": np.asarray(A),
    "array of 16 bits": np.asarray(A).astype(np.uint16) * 257,
    "array of floats": np.asarray(A) / 255,
    "channels first": np.moveaxis(np.asarray(A), -1, 0),
    "tensor": torch.from_numpy(np.asarray(A).copy()),
    "base64 with lines": base64.encodebytes(encoded(A)).decode(),
    "of datasets": {"bytes": encoded(A), "path": None},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_one_picture_are_one_picture(tmp_path, form):
    A.save(tmp_path / "a.png")
    value = FORMS[form](tmp_path) if callable(FORMS[form]) else FORMS[form]
    assert as_image(value, name="x", folder=tmp_path).decode().tobytes() == A.tobytes()


def test_grey_arrays_are_grey(tmp_path):
    ramp = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for values in (ramp, ramp[..., None]):
        shown = np.asarray(as_image(values, name="x", folder=tmp_path).decode())
        assert (shown == ramp[..., None]).all()


@pytest.mark.parametrize(
    "value, message",
    [
        (np.zeros((8, 8, 2)), "array of shape"),
        (np.zeros((0, 8)), "array of shape"),
        (np.full((8, 8), 70_000), "has numbers from 70000"),
        ("", "empty text"),
        (".", "is a folder"),
    ],
)
def test_what_is_no_picture_is_said(tmp_path, value, message):
    with pytest.raises(MediaError, match=message):
        as_image(value, name="x", folder=tmp_path)


def test_a_video_is_the_same_in_every_form(tmp_path):
    frames = [picture(56, 56, i) for i in range(4)]
    names = []
    for i, frame in enumerate(frames):
        frame.save(tmp_path / f"{i}.png")
        names.append(f"{i}.png")
    forms = [
        {"frames": names, "fps": 2},
        {"video": names, "fps": 2.0},
        {"video": {"frames": names, "fps": 2}},
        {"frames": frames, "fps": 2},
        {"video": np.stack([np.asarray(frame) for frame in frames]), "fps": 2},
    ]
    expected = np.stack([np.asarray(frame) for frame in frames])
    for form in forms:
        pixels, facts = as_video(form, name="x", folder=tmp_path).decode()
        assert (pixels == expected).all()
        assert facts["fps"] == 2


def test_a_part_may_hold_a_video(tmp_path):
    reader = VisionPrompts(tiny("tiny-qwen2.5-vl")[1])
    for i in range(4):
        picture(56, 56, i).save(tmp_path / f"{i}.png")
    part = {"type": "video", "video": [f"{i}.png" for i in range(4)], "fps": 2}
    parts = [part, {"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]
    found = load(tmp_path, {"input": [{"role": "user", "content": parts}]}, reader)
    assert [len(found.media[kind]) for kind in ("image", "video")] == [1, 1]
    assert found.text.index("video_pad") < found.text.index("image_pad")


def test_pictures_of_parquet_are_bytes(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    chat = [{"role": "user", "content": [{"type": "image"}, {"text": "?"}]}]
    table = pyarrow.table({"input": [chat], "image": [{"bytes": encoded(B), "path": None}]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    reader = VisionPrompts(tiny("tiny-qwen2.5-vl")[1])
    (found,) = load_prompts(tmp_path / "rows.parquet", reader, CONFIG).prompts
    assert names_of(found.media) == "b"


def test_an_image_of_one_colour_is_no_path(tmp_path):
    held = Image.new("RGB", (200, 200), (9, 99, 199))
    short = base64.b64encode(encoded(held)).decode()
    assert len(short) < 1024
    assert as_image(short, name="x", folder=tmp_path).decode().tobytes() == held.tobytes()

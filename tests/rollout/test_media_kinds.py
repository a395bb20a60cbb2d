"""A third kind of media is one row of the table, from the data to the inputs of a model."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightrft.config import TrainConfig
from lightrft.datasets import load_prompts
from lightrft.datasets.files import Row
from lightrft.datasets.media import VisionPrompts, with_media
from lightrft.datasets.types import DataError
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import VisionFamily
from lightrft.engines.media.files import MediaError
from lightrft.engines.media.inputs import media_inputs
from lightrft.engines.media.media import MEDIA_KINDS, Media, MediaKind, RowMedia
from lightrft.engines.media.sources import FileSource
from lightrft.engines.media.text_encoder import TEXT_ENCODER
from lightrft.engines.types import Completion
from lightrft.records.media import (
    MediaSources,
    agree_on_kinds,
    exchange_media,
    media_request,
    pack_sources,
    unpack_sources,
)
from lightrft.records.rollout import Rollout, ScoredRollout
from lightrft.records.table import row_table
from lightrft.strategy import get_fake_strategy

MARK, PLACE = 60, 900


class Tone(FileSource):
    """Samples of sound, one a byte."""

    def decode(self):
        return torch.tensor(list(self.read())).float()


def read_tone(value, *, name, folder):
    if not (folder / value).is_file():
        raise MediaError(f"{name}: no file {value}")
    return Tone(name, path=folder / value)


class Letters:
    """One token a letter."""

    chat_template = None
    all_special_ids = ()

    def __call__(self, text, *, add_special_tokens, split_special_tokens=False):
        one = isinstance(text, str)
        ids = [[ord(letter) for letter in each] for each in ([text] if one else text)]
        return {"input_ids": ids[0] if one else ids}


class Processor:
    """A placeholder for each two samples of a tone, whose places are marked `<tone>`."""

    chat_template = None
    tokenizer = Letters()

    def __call__(self, text, *, return_tensors, add_special_tokens, tones=((),)):
        ids, (own,) = [], tones
        for piece, tone in zip(text[0].split("<tone>"), [*own, None], strict=True):
            ids += [ord(letter) for letter in piece]
            ids += [] if tone is None else [PLACE] * (len(tone) // 2)
        values = {"tone_values": torch.cat(list(own)).reshape(-1, 2)} if own else {}
        every = torch.tensor([ids])
        return {"input_ids": every, "attention_mask": torch.ones_like(every), **values}


class Model(torch.nn.Module):
    """Adds the mean of a tone's samples where its placeholders are."""

    def forward(self, token_ids, tone_values):
        out = token_ids.float()
        out[token_ids == PLACE] += tone_values.mean(-1)
        return out


FAMILY = VisionFamily(
    "toy",
    kinds={"tone": "tone_values"},
    reads=frozenset({"tone"}),
    places=(PLACE,),
)


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    row = MediaKind("tones", f"{__name__}:read_tone", lambda decoded: {"tones": [decoded]})
    monkeypatch.setitem(MEDIA_KINDS, "tone", row)
    (tmp_path / "a.tone").write_bytes(bytes([2, 4, 6, 8]))
    (tmp_path / "b.tone").write_bytes(bytes([10, 30]))
    rows = [
        {"input": "x<tone>y", "tones": "a.tone"},
        {"input": "none"},
        {"input": "<tone>, <tone>", "tones": ["b.tone", "a.tone"]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    reader = VisionPrompts(PromptEncoder(Processor(), FAMILY))
    return reader, load_prompts(path, reader, TrainConfig(label_key=None)).prompts, path


def test_a_planted_kind_goes_from_the_data_into_the_inputs_of_a_model(prompts):
    reader, found, _ = prompts
    encoder = reader.encoder
    assert [prompt.media.kinds for prompt in found] == [("tone",), (), ("tone",)]
    # Rewards read the prompt's column as the row has it, not the tones.
    assert [prompt.columns for prompt in found] == [
        {"input": text} for text in ("x<tone>y", "none", "<tone>, <tone>")
    ]
    assert found[0].token_ids == (ord("x"), PLACE, PLACE, ord("y"))

    request = media_request(found[2], 7, encoder)
    assert [tone.decode().tolist() for tone in request.multi_modal.others["tone"]] == [
        [10, 30],
        [2, 4, 6, 8],
    ]
    assert request.encoded.kinds == {"tone"}

    context = get_fake_strategy().context
    scored = [
        ScoredRollout(
            Rollout(
                prompt,
                Completion(i, 0, prompt.token_ids, (ord("!"),), (0.0,), "temperature", "stop"),
                group_id=i,
                sample_id=i,
                response_text="!",
            ),
            0.0,
        )
        for i, prompt in enumerate(found)
    ]
    table = row_table(scored)
    delivered = exchange_media(table, scored, [np.arange(3)], context, encoder)
    media = RowMedia(delivered, agree_on_kinds(context, RowMedia(delivered).kinds))
    assert media.present == {"tone"}

    chosen = media[1:3]  # selecting copies no tensor
    assert chosen.prompts[1] is media.prompts[2]
    rows = [torch.tensor(item.rollout.token_ids) for item in scored[1:3]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    inputs = media_inputs(
        FAMILY, rows, chosen.of_rows(2), width=ids.shape[1], device=ids.device, dtype=torch.float32
    )
    added = Model()(ids, **inputs) - ids
    assert added[ids == PLACE].tolist() == [20.0, 3.0, 7.0]


def test_a_planted_kind_travels_to_other_ranks(prompts):
    _, found, _ = prompts
    own = {5: MediaSources(found[2].text, found[2].media)}
    ((key, again),) = unpack_sources(pack_sources(own, [5]))
    assert key == 5
    assert type(again.media["tone"][0]) is Tone
    assert [tone.digest for tone in again.media] == [tone.digest for tone in found[2].media]


def test_a_planted_kind_is_checked_like_the_others(prompts, tmp_path):
    reader, found, path = prompts
    path.write_text(json.dumps({"input": "<tone>", "tones": "gone.tone"}))
    with pytest.raises(DataError, match=r"jsonl:1: tone 1: no file gone\.tone"):
        load_prompts(path, reader, TrainConfig(label_key=None))
    with pytest.raises(DataError, match="1 images and 0 videos and 0 tones, and the row has 0 and"):
        with_media([{"role": "user", "content": "<image>"}], found[0].media, Row({}, "here"))
    with pytest.raises(ValueError, match="models of type toy read no images"):
        reader.encoder.encode("", Media({"image": (replace(found[0].media["tone"][0]),)}))


def test_the_encoder_of_text_has_empty_results(prompts):
    _, found, _ = prompts
    assert not TEXT_ENCODER.reads_media
    assert TEXT_ENCODER.row((1, 2), None, ()) is None
    assert TEXT_ENCODER.num_places("<tone>") == 0
    context = get_fake_strategy().context
    assert exchange_media(row_table([]), [], [np.arange(0)], context, TEXT_ENCODER) == ()
    with pytest.raises(ValueError, match="needs the model's processor"):
        TEXT_ENCODER.kept("", found[0].media)

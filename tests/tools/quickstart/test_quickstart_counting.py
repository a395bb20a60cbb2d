"""The quick starts that count in pictures and in sounds: what is shown, imitated and learnt."""

import json
import random
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
import torch
from tests.tools.quickstart.dice import Dice

from lightrft.cli.main import main
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import family_of
from lightrft.engines.media.media import Media
from lightrft.engines.media.sounds import as_audio, as_wav
from lightrft.engines.media.sources import as_image
from lightrft.engines.types import MediaBounds
from lightrft.tools.quickstart.quickstart_command import Recipe, prepare, reinforce
from lightrft.tools.quickstart.task import load_example
from lightrft.tools.quickstart.warm_start import IGNORED, build_student, demonstration_batch

pytestmark = pytest.mark.shard("quickstart_vision")
COLOURS, SHAPES, SIGHT, picture = (
    load_example(f"colours.py:{name}") for name in ("COLOURS", "SHAPES", "SIGHT", "picture")
)
HEARING, HEIGHTS, NOTE_SECONDS, RATE, TONES, waveform = (
    load_example(f"tones.py:{name}")
    for name in ("HEARING", "HEIGHTS", "NOTE_SECONDS", "RATE", "TONES", "waveform")
)
Counted, describe = (load_example(f"counting.py:{name}") for name in ("Counted", "describe"))

# Who always gives the best single answer without looking or listening is right this often.
CHANCE = 0.43


@dataclass(frozen=True)
class Kind:
    """A quick start that counts, and what a run makes of one of its exercises."""

    flag: str
    task: object
    sense: object
    part: str
    column: str
    first_file: str
    teacher: str
    media: object
    learnt: float


def image_of(counted):
    return Media({"image": [as_image(picture(counted), name="x", folder=None)]})


def sound_of(counted):
    return Media({"audio": [as_audio(as_wav(waveform(counted), RATE), name="x", folder=None)]})


KINDS = [
    Kind(
        flag="--vision",
        task=SHAPES,
        sense=SIGHT,
        part="image",
        column="images",
        first_file="pictures/train-3.png",
        teacher="colour-blind",
        media=image_of,
        learnt=0.9,
    ),
    Kind(
        flag="--audio",
        task=TONES,
        sense=HEARING,
        part="audio",
        column="audios",
        first_file="sounds/train-3.wav",
        teacher="tone-deaf",
        media=sound_of,
        learnt=0.85,
    ),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.part)
def kind(request):
    return request.param


@pytest.mark.parametrize(
    "sense, parts, question, keen, mistaken",
    [
        (SIGHT, "red green red yellow", "<image>How many red?", "2", "green green green yellow"),
        (HEARING, "low mid low top", "<audio>How many low?", "2", "mid mid mid top"),
    ],
)
def test_the_teacher_is_keen_or_mistakes_one_for_another(sense, parts, question, keen, mistaken):
    counted = Counted(sense, tuple(parts.split()), parts.split()[0], 0)
    assert (counted.question, counted.answer) == (question, keen)
    assert describe(counted, Dice(0.99)) == rf"<think>{parts}</think>\boxed{{{keen}}}"
    assert describe(counted, Dice(0.0)) == rf"<think>{mistaken}</think>\boxed{{0}}"


def test_arrangements_are_for_training_or_held_out(kind):
    parts = [
        {item.parts for item in islice(kind.sense.draw(random.Random(0), held_out), 3000)}
        for held_out in (False, True)
    ]
    assert parts[0].isdisjoint(parts[1])
    assert len(parts[0] | parts[1]) > 200


def test_a_picture_shows_its_colours_where_they_belong():
    for item in islice(SIGHT.draw(random.Random(2), False), 20):
        image = picture(item)
        assert image.tobytes() == picture(item).tobytes()
        for place, name in enumerate(item.parts):
            left, top = 28 * (place % 2), 28 * (place // 2)
            cell = image.crop((left, top, left + 28, top + 28))
            (shade,) = [pixel for _, pixel in cell.getcolors() if pixel != (255, 255, 255)]
            distances = {
                known: np.linalg.norm(np.subtract(colour, shade))
                for known, colour in COLOURS.items()
            }
            assert min(distances, key=distances.get) == name


def test_a_sound_has_its_notes_in_their_order():
    """The strongest frequency of each quarter is nearest to that of its note."""
    length = round(NOTE_SECONDS * RATE)
    for item in islice(HEARING.draw(random.Random(2), False), 20):
        wave = waveform(item)
        assert np.array_equal(wave, waveform(item))
        for place, name in enumerate(item.parts):
            part = wave[length * place : length * (place + 1)].astype(float)
            strongest = np.abs(np.fft.rfft(part)).argmax() * RATE / length
            near = min(HEIGHTS, key=lambda known: abs(np.log(HEIGHTS[known] / strongest)))
            assert near == name


def test_the_imitation_perceives_what_the_run_perceives(kind):
    """Token ids, pixels and features are those of the processor on the run's prompt."""
    student = build_student(kind.task, seed=0)
    counted = next(kind.sense.draw(random.Random(4), False))
    token_ids, targets = demonstration_batch(student.tokenizer, [counted], Dice(0.99))
    media = student.media([counted], token_ids)
    asked = {"type": "text", "text": counted.question.removeprefix(f"<{kind.part}>")}
    text = student.processor.apply_chat_template(
        [{"role": "user", "content": [{"type": kind.part}, asked]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    encoder = PromptEncoder(student.processor, family_of(student.model.config))
    encoded = encoder.encode(text, encoder.fitted(kind.media(counted), MediaBounds()))
    length = len(encoded.token_ids)
    assert tuple(token_ids[0, :length].tolist()) == encoded.token_ids
    assert set(targets[0, :length].tolist()) == {IGNORED}
    assert targets[0, length:].tolist() == token_ids[0, length:].tolist()
    for name, tensor in encoded.tensors.items():
        torch.testing.assert_close(media[name], tensor, atol=1e-5, rtol=0)
    if kind.part == "image":
        assert media["mm_token_type_ids"][0, :length].tolist() == list(encoded.token_types)


def test_the_imitation_has_the_places_that_the_model_gives():
    student = build_student(SHAPES, seed=0)
    drawn = list(islice(SIGHT.draw(random.Random(4), False), 3))
    token_ids, _ = demonstration_batch(student.tokenizer, drawn, random.Random(0))
    media = student.media(drawn, token_ids)
    found, _ = student.model.base_model.get_rope_index(
        token_ids,
        mm_token_type_ids=media["mm_token_type_ids"],
        image_grid_thw=media["image_grid_thw"],
    )
    assert torch.equal(media["position_ids"], found)


@pytest.mark.cover(1)
def test_a_short_run_shows_what_it_was_shown(kind, tmp_path, capsys):
    folder = tmp_path / "run"
    argv = [kind.flag, "--output_dir", str(folder), "--threads", "1"]
    argv += ["--steps", "1", "--warm_start_steps", "2", "--eval_prompts", "8"]
    assert main(["quickstart", *argv]) == 0
    shown = capsys.readouterr().out
    assert kind.teacher in shown.splitlines()[0]
    assert "step 1/1  reward" in shown
    rows = (folder / "data" / "train.jsonl").read_text().splitlines()
    assert json.loads(rows[3])[kind.column] == [kind.first_file]
    page = (folder / "report.html").read_text()
    if kind.part == "image":
        assert len(list((folder / "data" / "pictures").iterdir())) == len(rows) + 8
        samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
        assert all(len(sample["images"]) == 1 for sample in samples)
        assert f'<img class="medium" src="{samples[-1]["images"][0]}"' in page


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(3))
def test_looking_and_listening_are_learnt(kind, tmp_path, seed):
    folder = tmp_path / "run"
    argv = [kind.flag, "--seed", str(seed), "--output_dir", str(folder)]
    assert main(["quickstart", *argv]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] >= kind.learnt


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_pictures_and_sounds_of_other_rows_teach_nothing(kind, tmp_path):
    recipe = Recipe(task=kind.task, **kind.task.numbers)
    prepare(recipe, tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        path = tmp_path / "data" / name
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        media = [row[kind.column] for row in rows]
        others = media[len(media) // 2 :] + media[: len(media) // 2]
        assert all(own != other for own, other in zip(media, others, strict=True))
        changed = [
            json.dumps(row | {kind.column: other}) for row, other in zip(rows, others, strict=True)
        ]
        path.write_text("\n".join(changed) + "\n")
    outcome = reinforce(recipe, tmp_path)
    assert outcome.last_eval["eval/reward"] < CHANCE + 0.1

"""The quick start with sounds: what sounds, what is imitated, and that listening is learnt."""

from __future__ import annotations

import json
import random
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
from lightrft.engines.types import MediaBounds
from lightrft.tools.quickstart.counting import Counted, describe
from lightrft.tools.quickstart.quickstart_command import Recipe, prepare, reinforce, training_config
from lightrft.tools.quickstart.tones import (
    HEARING,
    HEIGHTS,
    NOTE_SECONDS,
    RATE,
    TONES,
    waveform,
)
from lightrft.tools.quickstart.warm_start import IGNORED, build_student, demonstration_batch

pytestmark = pytest.mark.shard("quickstart_vision")

# Who always gives the best single answer without listening is right this often.
CHANCE = 0.43


def test_the_teacher_is_keen_or_tone_deaf():
    tones = Counted(HEARING, ("low", "mid", "low", "top"), "low", 0)
    assert (tones.question, tones.answer) == ("<audio>How many low?", "2")
    assert describe(tones, Dice(0.99)) == r"<think>low mid low top</think>\boxed{2}"
    assert describe(tones, Dice(0.0)) == r"<think>mid mid mid top</think>\boxed{0}"


def test_arrangements_are_for_training_or_held_out():
    parts = [
        {item.parts for item in islice(HEARING.draw(random.Random(0), held_out), 3000)}
        for held_out in (False, True)
    ]
    assert parts[0].isdisjoint(parts[1])
    assert len(parts[0] | parts[1]) > 200


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


def test_the_imitation_hears_what_the_run_hears():
    """Token ids and features of a demonstration are those of the processor on the run's prompt."""
    student = build_student(TONES, seed=0)
    tones = next(HEARING.draw(random.Random(4), False))
    token_ids, targets = demonstration_batch(student.tokenizer, [tones], Dice(0.99))
    media = student.media([tones], token_ids)
    asked = {"type": "text", "text": tones.question.removeprefix("<audio>")}
    text = student.processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "audio"}, asked]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    encoder = PromptEncoder(student.processor, family_of(student.model.config))
    sound = as_audio(as_wav(waveform(tones), RATE), name="x", folder=None)
    encoded = encoder.encode(text, encoder.fitted(Media({"audio": [sound]}), MediaBounds()))
    length = len(encoded.token_ids)
    assert tuple(token_ids[0, :length].tolist()) == encoded.token_ids
    assert set(targets[0, :length].tolist()) == {IGNORED}
    assert targets[0, length:].tolist() == token_ids[0, length:].tolist()
    for name, tensor in encoded.tensors.items():
        torch.testing.assert_close(media[name], tensor, atol=1e-5, rtol=0)


def test_the_recipe_is_a_legal_configuration_without_unused_options(tmp_path):
    config = training_config(Recipe(task=TONES, **TONES.numbers), tmp_path)
    config.check_world_size(1)
    assert config.unused_options() == []


@pytest.mark.full
def test_a_short_run(tmp_path, capsys):
    folder = tmp_path / "run"
    argv = ["--audio", "--output_dir", str(folder), "--threads", "1"]
    argv += ["--steps", "1", "--warm_start_steps", "2", "--eval_prompts", "8"]
    assert main(["quickstart", *argv]) == 0
    assert "tone-deaf" in capsys.readouterr().out.splitlines()[0]
    rows = (folder / "data" / "train.jsonl").read_text().splitlines()
    assert json.loads(rows[3])["audios"] == ["sounds/train-3.wav"]
    assert (folder / "report.html").exists()


def shuffled(folder, name):
    """Gives every row of a file the sound of another one."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    sounds = [row["audios"] for row in rows]
    sounds = sounds[len(sounds) // 2 :] + sounds[: len(sounds) // 2]
    lines = [json.dumps(row | {"audios": own}) for row, own in zip(rows, sounds, strict=True)]
    (folder / name).write_text("\n".join(lines) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_listening_is_learnt(tmp_path, seed):
    folder = tmp_path / "run"
    argv = ["--audio", "--seed", str(seed), "--output_dir", str(folder)]
    assert main(["quickstart", *argv]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] >= 0.85


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_sounds_of_other_rows_teach_nothing(tmp_path):
    recipe = Recipe(task=TONES, **TONES.numbers)
    prepare(recipe, tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        shuffled(tmp_path / "data", name)
    outcome = reinforce(recipe, tmp_path)
    assert outcome.last_eval["eval/reward"] < CHANCE + 0.1

"""The quick start with pictures: what is shown, what is imitated, and that looking is learnt."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest
import torch
from tests.tools.quickstart.dice import Dice

from lightrft.cli.main import main
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import family_of
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import as_image
from lightrft.tools.quickstart.boxed_sum import score
from lightrft.tools.quickstart.colours import COLOURS, SHAPES, SIGHT, picture
from lightrft.tools.quickstart.counting import Counted, describe
from lightrft.tools.quickstart.quickstart_command import Recipe, prepare, reinforce, training_config
from lightrft.tools.quickstart.warm_start import IGNORED, build_student, demonstration_batch

pytestmark = pytest.mark.shard("quickstart_vision")

# Who always gives the best single answer without looking is right this often, on the held-out ones.
CHANCE = 0.43


def test_the_teacher_is_keen_or_colour_blind():
    shapes = Counted(SIGHT, ("red", "green", "red", "yellow"), "red", 0)
    assert (shapes.question, shapes.answer) == ("<image>How many red?", "2")
    assert describe(shapes, Dice(0.99)) == r"<think>red green red yellow</think>\boxed{2}"
    assert describe(shapes, Dice(0.0)) == r"<think>green green green yellow</think>\boxed{0}"


def test_a_colour_blind_teacher_is_right_one_time_in_three_and_so_is_a_guess():
    drawn = list(islice(SIGHT.draw(random.Random(0), True), 4000))
    labels = [item.answer for item in drawn]
    for p_blind, expected in ((0.0, 1.0), (1.0, 0.3)):
        said = [describe(item, random.Random(1), p_mistake=p_blind) for item in drawn]
        assert abs(sum(score([], said, labels)) / len(drawn) - expected) < 0.03
    best = max(labels.count(answer) for answer in "01234")
    assert abs(best / len(labels) - CHANCE) < 0.03


def test_arrangements_are_for_training_or_held_out():
    parts = [
        {item.parts for item in islice(SIGHT.draw(random.Random(0), held_out), 3000)}
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
            shades = [pixel for _, pixel in cell.getcolors() if pixel != (255, 255, 255)]
            ((red, green, blue),) = shades
            near = min(
                COLOURS,
                key=lambda known: sum(
                    (a - b) ** 2 for a, b in zip(COLOURS[known], (red, green, blue), strict=True)
                ),
            )
            assert near == name


def test_the_imitation_sees_what_the_run_sees():
    """Token ids and pixels of a demonstration are those of the processor on the run's prompt."""
    student = build_student(SHAPES, seed=0)
    shapes = next(SIGHT.draw(random.Random(4), False))
    token_ids, targets = demonstration_batch(student.tokenizer, [shapes], Dice(0.99))
    media = student.media([shapes], token_ids)
    asked = {"type": "text", "text": shapes.question.removeprefix("<image>")}
    text = student.processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, asked]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    encoder = PromptEncoder(student.processor, family_of(student.model.config))
    image = as_image(picture(shapes), name="x", folder=None)
    encoded = encoder.encode(text, Media({"image": [image]}))
    length = len(encoded.token_ids)
    assert tuple(token_ids[0, :length].tolist()) == encoded.token_ids
    assert set(targets[0, :length].tolist()) == {IGNORED}
    assert targets[0, length:].tolist() == token_ids[0, length:].tolist()
    assert student.tokenizer.decode(token_ids[0, :length]).endswith(
        f" {shapes.wanted}?<|assistant|>"
    )
    assert media["mm_token_type_ids"][0, :length].tolist() == list(encoded.token_types)
    for name, tensor in encoded.tensors.items():
        assert torch.equal(media[name], tensor), name


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


def test_the_recipe_is_a_legal_configuration_without_unused_options(tmp_path):
    config = training_config(Recipe(task=SHAPES, **SHAPES.numbers), tmp_path)
    config.check_world_size(1)
    assert config.unused_options() == []


def test_environment_and_vision_are_two_tasks(tmp_path, capsys):
    argv = ["--environment", "--vision", "--output_dir", str(tmp_path / "run")]
    assert main(["quickstart", *argv]) == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_short_run_shows_its_pictures(tmp_path, capsys):
    folder = tmp_path / "run"
    argv = ["--vision", "--output_dir", str(folder), "--threads", "1"]
    argv += ["--steps", "2", "--warm_start_steps", "2", "--eval_prompts", "8"]
    assert main(["quickstart", *argv]) == 0
    shown = capsys.readouterr().out
    assert "colour-blind" in shown.splitlines()[0]
    assert "step 2/2  reward" in shown
    rows = (folder / "data" / "train.jsonl").read_text().splitlines()
    assert json.loads(rows[3])["images"] == ["pictures/train-3.png"]
    assert len(list((folder / "data" / "pictures").iterdir())) == len(rows) + 8
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert all(len(sample["images"]) == 1 for sample in samples)
    page = (folder / "report.html").read_text()
    assert f'<img class="medium" src="{samples[-1]["images"][0]}"' in page


def shuffled(folder, name):
    """Gives every row of a file the picture of another one."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    images = [row["images"] for row in rows]
    images = images[len(images) // 2 :] + images[: len(images) // 2]
    lines = [json.dumps(row | {"images": own}) for row, own in zip(rows, images, strict=True)]
    (folder / name).write_text("\n".join(lines) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(5))
def test_looking_is_learnt(tmp_path, seed):
    folder = tmp_path / "run"
    argv = ["--vision", "--seed", str(seed), "--output_dir", str(folder)]
    assert main(["quickstart", *argv]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.45
    assert summary["accuracy_after"] >= 0.9
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if "reward" in line]
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + 0.15


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_pictures_of_other_rows_teach_nothing(tmp_path):
    recipe = Recipe(task=SHAPES, **SHAPES.numbers)
    prepare(recipe, tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        shuffled(tmp_path / "data", name)
    outcome = reinforce(recipe, tmp_path)
    assert outcome.last_eval["eval/reward"] < CHANCE + 0.1


def test_shuffling_moves_every_picture(tmp_path):
    rows = [{"prompt": str(i), "images": [f"{i}.png"]} for i in range(5)]
    (tmp_path / "a").write_text("\n".join(map(json.dumps, rows)))
    shuffled(tmp_path, "a")
    moved = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert sorted(row["images"][0] for row in moved) == sorted(f"{i}.png" for i in range(5))
    assert all(row["images"] != [f"{row['prompt']}.png"] for row in moved)

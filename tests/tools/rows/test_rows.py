"""Rows of a run's recorded samples: which are chosen, that they add up, and that no id changes."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from tests.records.exchange_cases import ThreadWorld, ragged_sample
from tests.runs import rollout_options, train_on_ranks, write, write_inputs

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.config.files import file_sha256, read_object, unsealed
from lightrft.datasets.preference_rows import load_preferences
from lightrft.datasets.row_origin import origin_of, origin_path
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.models.loading import load_tokenizer
from lightrft.reporting.rollouts import RecordedRollout, RolloutLog, read_rollout
from lightrft.stages.reward.reward_inputs import load_rows
from lightrft.tools.model_presets import write_tiny_model
from lightrft.tools.report.page import render_report
from lightrft.tools.rows.row_choice import CHOICES, FATES, USES, Sample, choose, count_fates
from lightrft.tools.rows.row_file import RowRequest, write_rows


def random_samples(rng, count=40):
    """Samples of five prompts, with few rewards, so that many are equal."""
    return [
        Sample(
            place,
            bytes([rng.integers(5)]),
            bytes([place]),
            reward=float(rng.integers(4)) / 2,
            accuracy=float(rng.integers(2)),
            is_truncated=bool(rng.random() < 0.3),
            excluded=str(rng.choice(["", "", "", "duplicate", "held_out"])),
        )
        for place in range(count)
    ]


def slowly_chosen(samples, name, most):
    """The definition: (place of the chosen, place of the rejected or None) of each row."""
    found = []
    usable = [each for each in samples if not each.excluded]
    for prompt in dict.fromkeys(each.prompt for each in usable):
        own = [each for each in usable if each.prompt == prompt]
        rows, used = [], set()
        while True:
            free = [each for each in own if each.place not in used]
            good = [each for each in free if name == "all" or not each.is_truncated]
            bad = free
            if name == "labelled":  # a right one needs an end
                good = [each for each in free if not (each.is_truncated and each.accuracy >= 1)]
            if name in ("right", "right_wrong"):
                good = [each for each in good if each.accuracy >= 1]
                bad = [each for each in bad if each.accuracy < 1]
            if not good or (name in ("best_worst", "right_wrong") and not bad):
                break
            best = max(good, key=lambda each: (each.reward, -each.place))
            worst = min(bad, key=lambda each: (each.reward, each.place), default=None)
            is_pair = name in ("best_worst", "right_wrong")
            if is_pair and best.reward <= worst.reward:
                break
            rows.append((best.place, worst.place if is_pair else None))
            used |= {place for place in rows[-1] if place is not None}
        found += rows[:most]
    return found


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("most", [1, 2, None])
def test_choices_are_those_of_the_definition_and_every_sample_is_counted_once(name, most):
    for seed in range(20):
        samples = random_samples(np.random.default_rng(seed))
        rows = choose(samples, CHOICES[name], threshold=1.0, max_per_prompt=most)
        found = [(row.chosen.place, row.rejected and row.rejected.place) for row in rows]
        assert found == slowly_chosen(samples, name, most)
        fates = count_fates(samples, rows)
        assert list(fates) == list(FATES)
        assert sum(fates.values()) == len(samples)
        assert fates["chosen"] == len(rows)
        assert fates["rejected"] == (len(rows) if CHOICES[name].makes_pairs else 0)
        assert fates["held_out"] == sum(each.excluded == "held_out" for each in samples)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_samples_of_all_ranks_are_written_in_one_order_whatever_the_ranks(tmp_path, world_size):
    rng = np.random.default_rng(0)
    scored = [ragged_sample(rng, i, kind="turns") for i in range(12)]
    held_out = scored[3].rollout.prompt.key
    path = tmp_path / "rollouts.jsonl"

    def record(context):
        log = RolloutLog(path, held_out=[held_out])
        for step in (1, 2):
            log.log(step, scored[context.rank :: world_size][::-1], context)
        log.close()

    ThreadWorld(world_size).run(record)
    lines = path.read_bytes().splitlines()
    found = [read_rollout(line, "a line") for line in lines]
    assert [(each.step, each.sample_id) for each in found] == [
        (step, i) for step in (1, 2) for i in range(12)
    ]
    for each, item in zip(found, scored * 2, strict=True):
        completion = item.rollout.completion
        assert each.prompt_ids == completion.prompt_token_ids
        assert each.response_ids == completion.output_token_ids
        assert each.is_sampled == list(completion.is_sampled)
        assert (each.reward, each.accuracy) == (item.unshaped, item.accuracy)
        assert each.masked == item.is_masked
        assert each.held_out == (item.rollout.prompt.key == held_out)


def line(sample_id, response=(5, 6, 2), prompt=(3, 4), **changes):
    """A line of a recorded sample."""
    values = {
        "step": 1,
        "sample_id": sample_id,
        "group_id": 0,
        "prompt_ids": prompt,
        "response_ids": response,
        "sampled_spans": ((0, len(response)),),
        "reward": 0.0,
        "accuracy": 0.0,
        "truncated": False,
        "masked": False,
        "held_out": False,
        "has_media": False,
        "weights_version": 0,
    }
    return json.dumps(asdict(RecordedRollout(**{**values, **changes}))) + "\n"


RIGHT = {"reward": 1.0, "accuracy": 1.0}
LINES = [
    line(0, (5, 6, 2), **RIGHT),
    line(1, (7, 2)),
    line(2, (5, 6, 2), **RIGHT),
    line(3, (9, 9), truncated=True),
    line(4, (8, 2), masked=True),
    line(5, (8, 2), (1, 1), held_out=True, **RIGHT),
    line(6, (8, 2), (4,), has_media=True, **RIGHT),
    # An environment answered with the token 7.
    line(7, (5, 7, 8, 2), (4, 4), sampled_spans=((0, 1), (2, 4)), **RIGHT),
    line(8, (6, 2)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "model"
    write_tiny_model(path, "tiny-qwen3", seed=1)
    return path


@pytest.fixture
def run_folder(tmp_path, model):
    folder = tmp_path / "run"
    TrainConfig(pretrain=str(model), eval_data="held.jsonl").save(folder / "config.toml")
    (folder / "rollouts.jsonl").write_text("".join(LINES))
    return folder


def written(folder, **request):
    path = folder.parent / "rows.jsonl"
    report = write_rows(RowRequest(folder, **request), path)
    return report, [json.loads(text) for text in path.read_text().splitlines()]


def test_rows_for_sft_mark_what_was_sampled(run_folder):
    report, rows = written(run_folder, use="sft", choice="right", max_per_prompt=4)
    assert [(row["token_ids"], row["is_trained"]) for row in rows] == [
        ([3, 4, 5, 6, 2], [0, 0, 1, 1, 1]),
        ([4, 4, 5, 7, 8, 2], [0, 0, 1, 0, 1, 1]),
    ]
    assert [row["sample_id"] for row in rows] == [0, 7]
    assert report.fates == {
        "chosen": 2,
        "rejected": 0,
        "left": 2,
        "truncated": 1,
        "duplicate": 1,
        "undecided": 1,
        "held_out": 1,
        "with_media": 1,
        "answered": 0,
    }


def test_pairs_have_both_answers_to_one_prompt(run_folder):
    report, rows = written(run_folder, use="prefer", choice="right_wrong", max_per_prompt=2)
    assert rows == [
        {
            "prompt_ids": [3, 4],
            "chosen_ids": [5, 6, 2],
            "rejected_ids": [7, 2],
            "score_chosen": 1.0,
            "score_rejected": 0.0,
            "step": 1,
            "sample_id": 0,
        }
    ]
    assert (report.fates["rejected"], report.fates["answered"]) == (1, 1)


def test_scores_of_all_samples_for_a_reward_model(run_folder):
    _, rows = written(run_folder, use="reward", choice="all")
    assert [(row["prompt_ids"], row["response_ids"], row["score"]) for row in rows] == [
        ([3, 4], [5, 6, 2], 1.0),
        ([3, 4], [7, 2], 0.0),
        ([3, 4], [9, 9], 0.0),
        ([3, 4], [6, 2], 0.0),
    ]


def test_the_origin_names_run_options_and_contents_by_hash(run_folder):
    report, _ = written(run_folder, use="best_of_n", choice="best", max_per_prompt=1)
    path = run_folder.parent / "rows.jsonl"
    origin = unsealed(read_object(origin_path(path)), "the origin")
    assert origin["run"] == "run"
    assert origin["rows_sha256"] == file_sha256(path)
    assert origin["rollouts_sha256"] == file_sha256(run_folder / "rollouts.jsonl")
    assert origin["config_sha256"] == file_sha256(run_folder / "config.toml")
    assert sum(origin[name] for name in FATES) == origin["sampled"] == report.num_sampled == 9


def test_rows_do_not_go_to_a_model_of_other_tokens(
    run_folder, model, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    written(run_folder, use="sft", choice="right", max_per_prompt=1)
    sft = ["sft", "--prompt_data", "rows.jsonl", "--train_batch_size", "2", "--output_dir", "again"]
    other_tokens(model, Path("other"))
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    seven, eight = sorted((token for token in vocab if vocab[token] in (6, 8)), key=vocab.get)
    assert main([*sft, "--pretrain", "other"]) == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"rows.jsonl: id 6 is {seven!r} in the rows and {eight!r} in the tokenizer" in line
    check = ["data", "check", "rows.jsonl", "--stage", "sft", "--pretrain"]
    assert main([*check, "other"]) == 4
    capsys.readouterr()
    assert main([*check, str(model)]) == 0
    origin_path(Path("rows.jsonl")).write_text("{}")
    assert main([*check, str(model)]) == 4
    assert "rows.jsonl.origin.json does not match its own SHA-256" in capsys.readouterr().err
    assert not Path("again").exists()


def test_a_run_and_its_report_name_the_run_that_the_rows_come_from(
    run_folder, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    written(run_folder, use="sft", choice="right", max_per_prompt=1)
    argv = ["sft", "--fsdp", "--pretrain", str(model), "--prompt_data", "rows.jsonl"]
    argv += ["--train_batch_size", "2", "--micro_train_batch_size", "2", "--output_dir", "again"]
    assert main(argv) == 0
    entry = read_object(Path("again/run.json"))["inputs"]["rows.jsonl"]
    config, samples = (file_sha256(run_folder / n)[:12] for n in ("config.toml", "rollouts.jsonl"))
    said = f"run of {model} (config {config}, rollouts {samples})"
    assert entry["origin"] == said
    assert f"rows.jsonl: samples of {said}" in render_report(Path("again"))
    # Rows that were changed have no origin.
    lines = Path("rows.jsonl").read_text().splitlines(keepends=True)
    Path("rows.jsonl").write_text("".join(lines[::-1]))
    assert origin_of(Path("rows.jsonl"), file_sha256(Path("rows.jsonl"))) == {}


def write_ragged(folder, prompts=6):
    """Two samples of random ids for each prompt; the first ones are right, and better."""
    rng = np.random.default_rng(3)
    lines = []
    for prompt in range(prompts):
        ids = (prompt, *rng.integers(258, size=rng.integers(1, 9)).tolist())
        for reward in (2.5, -1.0):
            response = (*rng.integers(258, size=rng.integers(1, 30)).tolist(), int(reward > 0))
            right = {"reward": reward, "accuracy": float(reward > 0)}
            lines.append(line(len(lines), response, ids, **right))
    (folder / "rollouts.jsonl").write_text("".join(lines))
    return [read_rollout(each.encode(), "a line") for each in lines]


@pytest.mark.parametrize("choice", ["best_worst", "right_wrong"])
def test_pairs_are_read_back_to_the_bit(run_folder, model, choice):
    recorded = write_ragged(run_folder)
    written(run_folder, use="prefer", choice=choice, max_per_prompt=1)
    data = load_preferences(
        str(run_folder.parent / "rows.jsonl"),
        load_tokenizer(str(model)),
        TrainConfig(),
        max_samples=100,
        split="train",
    )
    found = [row for pair in data.rows for row in pair.rows]
    for row, origin in zip(found, recorded, strict=True):
        assert row.token_ids.tolist() == [*origin.prompt_ids, *origin.response_ids]
        assert row.token_ids[row.is_trained].tolist() == list(origin.response_ids)
    assert {pair.margin for pair in data.rows} == {None}


def test_scores_are_read_back_to_the_bit(run_folder, model):
    recorded = write_ragged(run_folder)
    written(run_folder, use="reward", choice="all")
    data = load_rows(
        str(run_folder.parent / "rows.jsonl"),
        load_tokenizer(str(model)),
        TrainConfig(reward_loss="mse"),
        max_samples=100,
        split="train",
    )
    # Of each prompt the best first, as recorded.
    for each, origin in zip(data.rows, recorded, strict=True):
        assert each.answer.token_ids.tolist() == [*origin.prompt_ids, *origin.response_ids]
        assert each.score == origin.reward


def other_tokens(model, folder):
    """The model with two tokens of its tokenizer exchanged."""
    shutil.copytree(model, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    first, second = (token for token, i in vocab.items() if i in (6, 8))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "command, choice, arguments, said",
    [
        ("prefer", "best_worst", ["--pretrain", "other"], "rows.jsonl: id 6 is "),
        ("reward", "best_worst", ["--pretrain", "other"], "rows.jsonl: id 6 is "),
        ("reward", "all", ["--pretrain", "other"], "rows.jsonl: id 6 is "),
        ("prefer", "all", [], "rows.jsonl:1: expected columns chosen and rejected"),
        ("reward", "all", ["--apply_chat_template"], "rows with token ids have no turns"),
        ("prefer", "beyond", [], "rows.jsonl:1: column 'chosen_ids': got 999999, expected numb"),
        ("reward", "beyond", [], "rows.jsonl:1: column 'chosen_ids': got 999999, expected numb"),
    ],
)
def test_rows_that_do_not_fit_a_stage_are_one_line(
    run_folder, model, tmp_path, capsys, monkeypatch, command, choice, arguments, said
):
    monkeypatch.chdir(tmp_path)
    other_tokens(model, Path("other"))
    kind = "best_worst" if choice == "beyond" else choice
    _, (first, *_) = written(run_folder, use="reward", choice=kind)
    if choice == "beyond":
        Path("rows.jsonl").write_text(json.dumps(first | {"chosen_ids": [999999]}))
    argv = ["--pretrain", str(model), "--prompt_data", "rows.jsonl", "--train_batch_size", "1"]
    assert main([command, *argv, "--output_dir", "again", *arguments]) == 4
    (shown,) = capsys.readouterr().err.strip().splitlines()
    assert said in shown
    assert not Path("again").exists()


def test_the_line_that_a_run_is_writing_does_not_count(run_folder):
    path = run_folder / "rollouts.jsonl"
    whole, _ = written(run_folder, use="sft", choice="right")
    path.write_text("".join(LINES) + line(9, (1, 2), **RIGHT)[:-1])
    (run_folder.parent / "rows.jsonl").unlink()
    assert written(run_folder, use="sft", choice="right")[0] == whole


# Lines of the run, the threshold, and what is said of them.
WRONG = [
    (LINES, "2", "accuracies of whole answers go from 0 to 1, --threshold is 2"),
    ([], "1", "none of 0 samples fits: there are none"),
    ([*LINES, "{\n"], "1", "run/rollouts.jsonl:10: not valid JSON"),
    (
        [line(0, sampled_spans=((0, 4),))],
        "1",
        "rollouts.jsonl:1: the prompt is empty, or sampled_spans end behind the response",
    ),
    ([line(0, reward=float("nan"))], "1", "rollouts.jsonl:1: reward and accuracy must be finite"),
    ([line(0).replace("[5, 6, 2]", '"a"')], "1", "1: response_ids: got 'a', expected a list"),
]


@pytest.mark.parametrize("lines, threshold, said", WRONG)
def test_wrong_samples_are_one_line_and_nothing_is_written(
    run_folder, capsys, monkeypatch, lines, threshold, said
):
    monkeypatch.chdir(run_folder.parent)
    (run_folder / "rollouts.jsonl").write_text("".join(lines))
    before = sorted(run_folder.parent.rglob("*"))
    argv = ["run", "--for", "sft", "--output", "rows.jsonl", "--threshold", threshold]
    assert main(["rows", *argv]) == 4
    (shown,) = capsys.readouterr().err.strip().splitlines()
    assert said in shown
    assert sorted(run_folder.parent.rglob("*")) == before


@pytest.mark.full
def test_chosen_ids_are_the_sampled_ones_and_supervised_rows_take_them(tmp_path, model, capsys):
    prompts = [{"prompt": f"say {letter}"} for letter in "aeio"]
    inputs = write_inputs(tmp_path, prompts)
    options = rollout_options(
        inputs,
        pretrain=str(model),
        eval_data=write(tmp_path / "held.jsonl", prompts[:1]),
        train_batch_size=16,
        micro_train_batch_size=8,
        generate_max_len=96,
        num_episodes=2,
        num_threads=1,
        save_rollouts=True,
        save_trajectories=True,
        trajectory_steps=1,
        num_trajectories_to_save=100,
    )
    train_on_ranks(2, [options])
    # Another recorder of the rows that the first rank trains on, after they were delivered.
    seen = {
        (each["step"], each["sample_id"]): each["token_ids"]
        for each in map(json.loads, (tmp_path / "run/trajectories.jsonl").read_text().splitlines())
    }
    recorded = [
        read_rollout(text, "a line")
        for text in (tmp_path / "run/rollouts.jsonl").read_bytes().splitlines()
    ]
    assert [(each.step, each.sample_id) for each in recorded] == [
        (step, i) for step in (1, 2) for i in range(16)
    ]
    by_place = {(each.step, each.sample_id): each for each in recorded}
    assert len(seen) == 16
    assert all(list(by_place[place].response_ids) == ids for place, ids in seen.items())

    rows = tmp_path / "rows.jsonl"
    assert main(["rows", str(tmp_path / "run"), "--for", "best_of_n", "--output", str(rows)]) == 0
    assert "held_out" in capsys.readouterr().out
    tokenizer = load_tokenizer(str(model))
    data = load_supervised(
        str(rows),
        tokenizer,
        TrainConfig(max_row_tokens=128),
        max_samples=100,
        split="train",
    )
    chosen = [json.loads(text) for text in rows.read_text().splitlines()]
    assert 0 < len(data) == len(chosen) <= 3
    held_out = tuple(tokenizer("say a")["input_ids"])
    assert {each.prompt_ids for each in recorded if each.held_out} == {held_out}
    for row, columns in zip(data.rows, chosen, strict=True):
        origin = by_place[columns["step"], columns["sample_id"]]
        assert row.token_ids.tolist() == [*origin.prompt_ids, *origin.response_ids]
        assert row.token_ids[row.is_trained].tolist() == list(origin.response_ids)
        assert origin.prompt_ids != held_out
        assert origin.reward == max(
            each.reward
            for each in recorded
            if each.prompt_ids == origin.prompt_ids and not each.truncated
        )


def test_every_use_has_choices_that_are_there():
    assert {name for names in USES.values() for name in names} == set(CHOICES)

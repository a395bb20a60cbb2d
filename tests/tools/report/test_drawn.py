"""Draws of a run in its report and its records."""

from tests.runs import lines, rollout_options, say_rows, tiny_models, train, write, write_inputs
from transformers import AutoTokenizer

from lightrft.tools.report.drawn import charts_of_draws, draw_facts, read_draws
from lightrft.tools.report.page import render_report


def step(number, *groups):
    names = ("rows", "accuracies", "without_signal")
    return {
        "step": number,
        "num_prompts": 9,
        **dict(zip(names, zip(*groups, strict=True), strict=True)),
    }


def test_accuracy_by_difficulty_and_groups_without_a_signal_by_hand(tmp_path):
    path = tmp_path / "draws.jsonl"
    write(
        path,
        [
            step(1, (0, 0.0, True), (1, 0.5, False), (2, 1.0, True), (3, None, True)),
            step(2, (0, 0.25, False), (1, 0.75, False), (3, 1.0, True), (0, 0.75, False)),
        ],
    )
    path.write_text(path.read_text() + '{"step": 3, "num_prompts": 9, "rows": [1], "accur')
    draws = read_draws(path)
    by_difficulty, without = charts_of_draws(draws)
    assert by_difficulty.series == {"hard at first": [(2, 0.5)], "between": [(2, 0.75)]}
    assert without.series == {"solved": [(1, 0.25), (2, 0.25)], "not solved": [(1, 0.25), (2, 0)]}
    ((_, text),) = draw_facts(draws)
    assert (
        text == "4 of 9 in 8 groups; most often row 0 3x, row 1 2x, row 3 2x, row 2 1x; fewest 1x"
    )


def test_a_run_records_rows_probabilities_and_texts(tmp_path):
    rows = say_rows(9, w=lambda number: 1 + number % 3, label=str)
    folder = write_inputs(tiny_models(tmp_path, "model"), rows)
    run, saved = tmp_path / "run", {"save_rollouts": True, "save_rollout_texts": True}
    train(rollout_options(folder, prompt_weight="w", num_episodes=2, max_steps=1, **saved))
    samples = lines(run / "rollouts.jsonl")
    for each in samples:
        row = rows[each["row"]]
        assert each["draw_probability"] == row["w"] / 18
        assert (each["prompt_text"], each["label"]) == (row["prompt"], row["label"])
        assert each["columns"] == row
        ids, tokenizer = each["response_ids"], AutoTokenizer.from_pretrained(folder / "model")
        assert each["text"] == tokenizer.decode(ids, skip_special_tokens=True)
    (drawn,) = lines(run / "draws.jsonl")
    assert drawn["rows"] == list(dict.fromkeys(each["row"] for each in samples))
    assert "of 9 in 4 groups" in render_report(run)

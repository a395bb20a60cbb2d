"""The first view of the report, and runs side by side."""

import json
import re

from tests.tools.report.report_runs import change_lines, write_run

from lightrft.cli.main import main
from lightrft.reporting.files import note_interruption, write_event
from lightrft.tools.report.page import find_alarms, render_report
from lightrft.tools.report.report_command import (
    differing_options,
    distinct_names,
    render_comparison,
)
from lightrft.tools.report.run_data import read_run
from lightrft.tools.report.sample_page import choose_samples, choose_tokens


def test_samples_and_tokens_open_on_the_last_step_whose_rewards_differ(tmp_path):
    folder = write_run(tmp_path / "run", 60, solved_from=31)
    assert choose_samples(folder).telling_step == 30
    assert choose_tokens(folder).telling_step == 30
    assert max(choose_tokens(folder).steps) == 60
    text = render_report(folder)
    assert "<details open><summary>step 30: 4 samples" in text
    assert text.count("<details open><summary>step") == 1
    assert "<option selected>30</option>" in text


def test_without_differences_the_newest_step_is_open(tmp_path):
    assert choose_samples(write_run(tmp_path / "run", 5, solved_from=1)).telling_step == 5
    assert choose_samples(tmp_path / "none").telling_step is None


def test_equal_samples_are_one_row_with_their_number(tmp_path):
    folder = write_run(tmp_path / "run", 1)
    line = (folder / "samples.jsonl").read_text().splitlines()[0]
    (folder / "samples.jsonl").write_text((line + "\n") * 7)
    ((row,),) = choose_samples(folder).steps.values()
    assert row["count"] == 7
    text = render_report(folder)
    assert "step 1: 7 samples" in text
    assert text.count("7 equal</span>") == 1


def test_a_solved_run_is_no_alarm_and_a_run_of_equal_failures_is(tmp_path):
    solved = read_run(write_run(tmp_path / "a", 10, solved_from=4))
    assert find_alarms(solved) == []
    # Equal rewards, and not the best ones: what was learnt is gone.
    nothing = dict.fromkeys(("reward", "reward_min", "reward_max"), 0.0)
    change_lines(tmp_path / "a", "metrics", lambda row: row | (nothing if row["step"] > 6 else {}))
    (alarm,) = find_alarms(read_run(tmp_path / "a"))
    assert alarm.startswith("4 steps from 7 on: constant_group_share")


def test_an_interruption_is_told(tmp_path):
    folder = write_run(tmp_path / "run", 3)
    note_interruption(folder)  # of a run that has never begun
    assert not (folder / "events.jsonl").exists()
    (folder / "summary.json").unlink()
    write_event(folder, "started", step=0, details={"world_size": 1})
    note_interruption(folder)
    run = read_run(folder)
    assert (run.status, run.events[-1].sentence) == (
        "interrupted",
        "interrupted (Ctrl-C) after step 3",
    )
    assert "interrupted by Ctrl-C: the same command continues" in render_report(folder)
    write_event(folder, "resumed", step=3, details={})
    assert read_run(folder).status == "running"
    write_event(folder, "finished", step=3, details={})
    note_interruption(folder)
    assert read_run(folder).events[-1].name == "finished"


def test_runs_are_compared_by_curve_and_by_what_differs(tmp_path, capsys):
    one = write_run(tmp_path / "x" / "run", 8, actor_learning_rate=1e-5, output_dir="a")
    two = write_run(tmp_path / "y" / "run", 4, actor_learning_rate=3e-5, best=0.5, output_dir="b")
    assert main(["report", str(one), str(two)]) == 0
    path = one / "comparison.html"
    assert capsys.readouterr().out == f"wrote {path}\n"
    text = path.read_text()
    charts = json.loads(re.search(r'id="page-data">(.*?)</script>', text)[1])["charts"]
    assert {chart["kind"] for chart in charts} == {"runs"}
    reward = charts[0]
    assert [series["name"] for series in reward["series"]] == ["x/run", "y/run"]
    assert [len(series["x"]) for series in reward["series"]] == [8, 4]
    runs = {"x/run": read_run(one), "y/run": read_run(two)}
    assert differing_options(runs) == [("actor_learning_rate", ["1e-05", "3e-05"])]
    assert "<code>3e-05</code>" in text
    assert "0.500 → 0.500" in text
    assert "0.250 → 0.250" in text


def test_a_comparison_is_written_where_it_is_asked_for(tmp_path):
    folders = [str(write_run(tmp_path / name)) for name in ("one", "two")]
    path = tmp_path / "pages" / "all.html"
    assert main(["report", *folders, "--output", str(path)]) == 0
    assert "runs" in path.read_text()
    assert not (tmp_path / "one" / "comparison.html").exists()


def test_many_pages_share_one_chart_library(tmp_path):
    folders = [write_run(tmp_path / "my runs" / name) for name in ("one", "two")]
    assert main(["report", str(folders[0]), "--shared"]) == 0
    assert main(["report", str(folders[1]), "--shared"]) == 0
    assert main(["report", *map(str, folders), "--shared"]) == 0
    (library,) = (tmp_path / "my runs").glob("lightrft-charts-*.js")
    pages = [folders[0] / "report.html", folders[1] / "report.html", folders[0] / "comparison.html"]
    for page in pages:
        assert page.stat().st_size < 200_000
        assert f'src="../{library.name}"></script>' in page.read_text()


def test_held_out_scores_come_first_and_curves_of_zeros_are_left_out(tmp_path):
    text = render_report(write_run(tmp_path / "run", metrics={"eval/reward": 0.25}))
    titles = re.findall(r"<h3>(.*?)</h3>", text)
    assert titles[:2] == ["Held-out reward", "Reward"]
    assert "Truncated responses" not in titles
    assert re.search(r"<dt>eval/reward</dt>.*<dt>reward</dt>", text, re.DOTALL)


def test_a_prompt_stands_once_above_its_responses(tmp_path):
    text = render_report(write_run(tmp_path / "run", 1))
    samples = text[text.index('id="samples"') : text.index('id="tokens"')]
    rows = re.findall(r'<tr class="prompt">|the sum is \d+', samples)
    assert rows == ['<tr class="prompt">', "the sum is 0", '<tr class="prompt">', "the sum is 10"]


def test_names_of_runs_are_as_long_as_they_must_be(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "b" / "other"]
    assert distinct_names(folders) == ["a/run", "b/run", "b/other"]
    assert distinct_names([tmp_path / "one", tmp_path / "two"]) == ["one", "two"]
    same = [tmp_path / "one", tmp_path / "one"]
    assert distinct_names(same) == ["one (1)", "one (2)"]


def test_hostile_names_and_options_stay_text_in_a_comparison(tmp_path):
    bad = "<script>alert(1)<"
    one = write_run(tmp_path / bad, 2, pretrain=bad)
    text = render_comparison([one, write_run(tmp_path / "two", 2)])
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_no_control_character_of_a_file_reaches_the_page(tmp_path):
    folder = write_run(tmp_path / "run", 2)
    write_event(folder, "\x1b[2Jevent", step=2, details={})
    prompt = "\x1b]0;prompt\x07 \ud83d\ude00 é"
    change_lines(folder, "samples", lambda row: row | {"prompt": prompt})
    text = render_report(folder)
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text) is None
    assert "\\x1b[2Jevent" in text
    assert "é" in text

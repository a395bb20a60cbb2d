"""The report on runs that have ended, run, crashed, or left little."""

import json
import math
import re
from html.parser import HTMLParser
from unittest.mock import patch

import pytest
from tests.tools.report.report_runs import append, write_run

import lightrft.tools.report.page as report_module
from lightrft.reporting.files import drop_steps_after
from lightrft.reporting.metric_table import METRICS, STAGES
from lightrft.tools.report.charts import MAX_BUCKETS, Chart, downsample
from lightrft.tools.report.page import find_alarms, render_report, write_report
from lightrft.tools.report.run_data import read_run
from lightrft.tools.report.sample_page import (
    BYTE_BUDGET,
    MAX_TOKENS,
    QUANTITIES,
    choose_samples,
    choose_tokens,
    readable,
    token_sample,
)


def at(moment, read, folder):
    with patch("time.time", return_value=moment):
        return read(folder)


def last_write(folder):
    return max(path.stat().st_mtime for path in folder.iterdir())


@pytest.fixture
def run(tmp_path):
    """Write a run of five steps without tokens."""

    def write(num_steps=5, *, name="run", **how):
        return write_run(tmp_path / name, num_steps, has_tokens=False, **how)

    return write


def write_trajectories(folder, num_steps=1, **changes):
    line = {
        "prompt": "p",
        "reward": 1.0,
        "tokens": ["a", "b"],
        "logprobs": [-0.5, -0.25],
        "rollout_logprobs": [-0.5, -0.35],
        "advantages": [0.5, -1.5],
        "entropy": [0.125, 2.0],
    }
    steps = range(1, num_steps + 1)
    append(folder, "trajectories", *({"step": step, **line, **changes} for step in steps))


PER_TOKEN = ("logprobs", "rollout_logprobs", "advantages", "entropy")


class Page(HTMLParser):
    """Tags, attributes and texts of a page; void and SVG-empty tags need no end."""

    VOID = ("meta", "br")

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.open, self.texts, self.scripts = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        else:
            self.texts.append(data)

    def data(self, name):
        """The text of the data block with this id."""
        (text,) = [text for attributes, text in self.scripts if attributes.get("id") == name]
        return text


def only_our_scripts(page):
    """Two blocks of data, and one script that has the number without which nothing runs."""
    policy = next(v for _, v in page.attributes if v and v.startswith("default-src"))
    (nonce,) = re.findall(r"script-src 'nonce-([\w-]{20,})'", policy)
    kinds = [(a.get("type"), a.get("id"), a.get("nonce")) for a, _ in page.scripts]
    return "default-src 'none'" in policy and kinds == [
        ("application/json", "page-data", None),
        ("text/plain", "chart-library", None),
        (None, None, nonce),
    ]


def page_of(folder):
    """Return the page of a run, of which every tag is closed and only our scripts run."""
    page = Page(render_report(folder))
    assert page.open == []
    assert only_our_scripts(page)
    return page


def test_a_finished_run_shows_curves_times_samples_and_options(run, tmp_path):
    assert write_report(run(name="my_run")) == tmp_path / "my_run" / "report.html"
    page = page_of(tmp_path / "my_run")
    shown = "\n".join(page.texts)
    for part in ("my_run", "finished", "Reward", "Entropy", "KL to the reference model"):
        assert part in shown
    assert "5 + 0 =" in shown
    assert '"some/model"' in shown
    assert METRICS["entropy"].meaning in shown


def test_the_page_needs_no_network_and_runs_no_script_but_its_own(run):
    hostile = 'see https://example.org/ <img src="https://example.org/x.png" onerror="alert(1)">'
    page = page_of(run(said=hostile))
    assert {"img", "link", "iframe", "object", "base", "form"}.isdisjoint(page.tags)
    addresses = [v for k, v in page.attributes if k in ("src", "href", "xlink:href", "action")]
    assert addresses
    assert all(address.startswith("#") for address in addresses)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert not any("//" in (value or "") for _, value in page.attributes)
    assert hostile in page.texts


@pytest.mark.parametrize(
    "response",
    [
        "<script>alert(1)</script>",
        "</pre></td><script>alert(1)</script>",
        "{{ 7 * 7 }} {% raw %}",
        "\"'><svg onload=alert(1)>",
        "&lt;script&gt; &amp;",
        "\u202edrawkcab \u2028 new line",
    ],
)
def test_what_a_model_says_stays_text(run, response):
    folder = run(said=response)
    write_trajectories(folder, prompt=response, tokens=[response] * 2)
    page = page_of(folder)
    assert page.texts.count(response) == 10
    (sample,) = json.loads(page.data("page-data"))["tokens"]["1"]
    assert (sample["prompt"], sample["tokens"]) == (readable(response), [readable(response)] * 2)


def conversation(said, answer, *, outcome="ok", count=1):
    call = {"name": "calculate", "arguments": {}, "outcome": outcome, "answer": answer}
    turns = [{"said": said, "calls": [call]}] * count
    return {"step": 9, "prompt": "p", "response": said, "reward": 1.0, "turns": turns}


@pytest.mark.parametrize(
    "text",
    ["</pre><script>alert(1)</script>", "{{ 7 * 7 }}", "\"'><svg onload=alert(1)>", "a\x00b"],
)
def test_conversations_are_shown_turn_by_turn_and_stay_text(run, text):
    folder = run()
    other = conversation("other", text, outcome=text)
    append(folder, "samples", conversation(text, f"answer {text}"), other)
    page = page_of(folder)
    assert page.texts.count(readable(text)) == 2
    assert page.texts.count(readable(f"answer {text}")) == 1
    assert page.texts.count("calculate") == 1
    assert page.texts.count(readable(f"calculate: {text}")) == 1
    assert ("class", "turn observation") in page.attributes


def test_branches_of_an_episode_name_their_parents(run):
    folder = run()
    of_first, of_branch = {"of": 0, "after": 1, "said": ["b", "c"]}, {"of": 1, "after": 2}
    rows = [of_first, {"of": 0, "after": 0, "said": ["<i>"]}, {**of_branch, "said": ["d"]}]
    odd = [3, {"of": 9, "after": [], "said": 1}]
    branched = ({**conversation("a", a), "branches": b} for a, b in (("x", rows), ("y", odd)))
    append(folder, "samples", *branched)
    whole, broken = choose_samples(folder).steps[9]
    assert whole["branches"] == [
        ("branch 1, after turn 1", ["b", "c"]),
        ("branch 2, after turn 0", ["<i>"]),
        ("branch 3, after turn 2 of branch 1", ["d"]),
    ]
    assert [said for _, said in broken["branches"]] == [[], []]
    page = page_of(folder)
    assert page.texts.count("branch 3, after turn 2 of branch 1") == page.texts.count("<i>") == 1


def test_long_and_broken_conversations_are_bounded(run):
    folder = run()
    odd = {"step": 9, "response": "r", "turns": [3, {"calls": [None]}, {"said": 1}]}
    append(folder, "samples", conversation("s" * 9000, "a" * 9000, count=100), odd)
    long, broken = sorted(choose_samples(folder).steps[9], key=lambda s: -len(str(s)))
    assert len(long["turns"]) == 33
    assert long["turns"][-1] == ("", "[168 more]")
    assert max(len(text) for _, text in long["turns"]) < 2100
    assert broken["turns"] == [("model", ""), ("model", "1")]
    page_of(folder)


def test_secrets_in_the_configuration_are_not_shown(run):
    assert "hunter2" not in render_report(run(wandb_api_key="hunter2"))


def test_a_half_written_last_line_is_left_out_and_counted(run):
    folder = run(has_ended=False)
    whole = [line + "\n" for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(whole) + whole[0][:57])
    with (folder / "samples.jsonl").open("ab") as stream:
        stream.write('{"step": 6, "response": "é'.encode()[:-1])
    assert list(read_run(folder).metrics) == [1, 2, 3, 4, 5]
    write_trajectories(folder)
    with (folder / "trajectories.jsonl").open("a") as stream:
        stream.write('{"step": 2, "tokens": ["a')
    text = render_report(folder)
    assert "trajectories.jsonl: 1 unreadable lines left out." in text
    assert "metrics.jsonl: 1 unreadable lines left out." in text
    assert "1 unreadable lines left out" in text.split('id="samples"')[1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "config.toml"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe[1, 2]\n\x00", b'{"step": "x"}\n[]\n3\n'])
def test_a_missing_or_broken_file_becomes_a_note(run, name, content):
    folder = run(has_ended=False)
    if content is None:
        (folder / name).unlink()
        assert f"{name} is missing." in render_report(folder)
    else:
        (folder / name).write_bytes(content)
        assert Page(render_report(folder)).open == []


def test_finished_running_and_crashed_are_told_apart(run):
    folder = run(has_ended=False)
    written = last_write(folder)
    assert at(written + 200, read_run, folder).status == "running"
    assert at(written + 400, read_run, folder).status == "stopped"
    assert "crashed or killed" in at(written + 400, render_report, folder)
    (folder / "summary.json").write_text('{"num_steps": 5}')
    assert at(written + 4000, read_run, folder).status == "finished"
    (folder / "summary.json").write_text('{"num_steps": 4}')  # of the part before a resume
    assert at(written + 4000, read_run, folder).status == "stopped"


def test_long_steps_are_given_more_time_before_a_run_counts_as_crashed(run):
    folder = run(has_ended=False, metrics={"step_seconds": 100.0})
    written = last_write(folder)
    assert at(written + 1900, read_run, folder).status == "running"
    assert at(written + 2100, read_run, folder).status == "stopped"


@pytest.mark.full
def test_a_long_run_stays_below_five_megabytes_and_shows_its_last_step(run):
    folder = run(2000, said="<&'\"" * 2000)  # each character grows when it is escaped
    write_trajectories(
        folder, 20, tokens=["<&'\"\u2028"] * 900, **dict.fromkeys(PER_TOKEN, [-0.12345678] * 900)
    )
    path = write_report(folder)
    assert 3_000_000 < path.stat().st_size < 5_000_000
    assert "step 2000: 4 samples" in path.read_text()
    assert len(choose_samples(folder).steps) > 5


def test_samples_are_spread_over_the_run_within_the_budget(run):
    choice = choose_samples(run(100, said="x" * 50))
    steps = list(choice.steps)
    assert (len(steps), steps[0], steps[-1], choice.num_steps) == (24, 100, 1, 100)
    assert [sample["reward"] for sample in choice.steps[100]] == ["0", "1"]
    assert BYTE_BUDGET < 5_000_000


def test_control_characters_are_shown_and_long_texts_are_cut():
    assert readable("a\x1b[31m\x00\n\t") == "a␛[31m␀\n\t"
    assert readable("\ud800") == "?"
    assert readable("abcdef", max_characters=3) == "abc\n[cut here: 6 characters in all]"


def test_values_that_are_not_finite_become_gaps(run):
    folder = run(metrics={"entropy": math.nan, "grad_norm": 1e300})
    for name in ("entropy", "grad_norm"):
        assert read_run(folder).points(name) == [(step, None) for step in range(1, 6)]
    page = page_of(folder)
    charts = json.loads(page.data("page-data"))["charts"]
    drawn = {series["name"]: series["y"] for chart in charts for series in chart["series"]}
    assert "entropy" not in drawn  # without any value there is nothing to draw
    gaps = Chart("t", "lines", {"a": [(1, 0.0), (2, None), (3, 1.0)]}).as_json()
    assert gaps["series"][0]["y"] == [0.0, None, 1.0]
    assert "not finite" in page.texts


def test_downsampling_keeps_spikes_gaps_and_order():
    points = [(step, 0.0) for step in range(10_000)]
    points[1234], points[7777], points[5000] = (1234, 9.0), (7777, -9.0), (5000, None)
    kept = downsample(points, 100)
    assert len(kept) <= 300
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {(1234, 9.0), (7777, -9.0), (5000, None)} <= set(kept)
    assert downsample(points[:50], 100) == points[:50]


def test_steps_outside_the_healthy_range_are_named(run):
    (alarm,) = find_alarms(read_run(run(name="a", metrics={"truncated_share": 0.5})))
    assert alarm == "5 steps from 1 on: truncated_share, up to 0.5 (healthy: at most 0.2)"
    assert find_alarms(read_run(run(name="b"))) == []


def test_a_single_response_per_prompt_raises_no_alarm_of_equal_rewards(run):
    folder = run(metrics={"constant_group_share": 1.0})
    assert len(find_alarms(read_run(folder))) == 1
    (folder / "config.toml").write_text("n_samples_per_prompt = 1\n")
    assert find_alarms(read_run(folder)) == []


def test_every_curve_and_stage_has_a_row():
    names = {name for _, group in report_module.CURVES.items() for name in group}
    assert names | {f"{stage}_seconds" for stage in STAGES} <= set(METRICS)


def test_a_resume_keeps_lines_with_unusual_line_separators(tmp_path):
    rows = [{"step": step, "response": "a\u2028b\x85c"} for step in (1, 2)]
    append(tmp_path, "samples", *rows)
    path = tmp_path / "samples.jsonl"
    drop_steps_after(path, 1)
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == rows[:1]


def test_tokens_carry_the_numbers_of_the_file_and_what_follows_from_them(tmp_path):
    write_trajectories(tmp_path, 100)
    choice = choose_tokens(tmp_path)
    assert list(choice.steps)[:2] == [100, 91]
    assert (len(choice.steps), choice.num_steps, choice.num_unreadable) == (12, 100, 0)
    (sample,) = choice.steps[100]
    assert [name for name in QUANTITIES if name in sample] == list(QUANTITIES)
    assert sample["advantage"] == [0.5, -1.5]
    assert sample["entropy"] == [0.125, 2.0]
    assert sample["probability"] == pytest.approx([math.exp(-0.5), math.exp(-0.25)], rel=1e-4)
    assert sample["ratio"] == pytest.approx([1.0, math.exp(0.1)], rel=1e-4)


def test_tokens_without_numbers_or_with_broken_ones_are_shown_as_they_are():
    sample = token_sample({"tokens": ["a", "b"], "logprobs": [math.nan, 1e3], "entropy": [1.0]})
    assert sample["probability"] == [None, pytest.approx(math.exp(50), rel=1e-4)]
    assert "entropy" not in sample
    assert "advantage" not in sample
    assert token_sample({"tokens": []}) is None
    assert token_sample({"tokens": "ab"}) is None
    long = token_sample({"tokens": ["a"] * 1000, "advantages": [1.0] * 1000})
    assert (len(long["tokens"]), len(long["advantage"]), long["num_tokens"]) == (
        MAX_TOKENS,
        MAX_TOKENS,
        1000,
    )


def test_charts_have_the_points_of_the_run_and_bounds_that_are_near():
    chart = Chart("t", "lines", {"approx_kl": [(1, 0.08), (2, None), (4, 0.12345678)]})
    assert chart.as_json() == {
        "kind": "lines",
        "series": [{"name": "approx_kl", "x": [1, 2, 4], "y": [0.08, None, 0.123457]}],
        "bounds": [0.1],
        "unit": "nats",
    }
    points = [(step, float(step)) for step in range(100_000)]
    long = Chart("t", "lines", {"approx_kl": points}).as_json()
    assert len(long["series"][0]["x"]) <= 3 * MAX_BUCKETS < 2000


def test_without_scripts_the_page_has_values_meanings_and_times(run):
    page = page_of(run())
    assert "svg" not in page.tags
    for values in (["kl", "0.01", "0.05"], ["response_length", "21", "25"]):
        place = page.texts.index(values[0], page.texts.index("All metrics"))
        assert page.texts[place : place + 3] == values
    assert all(METRICS[f"{stage}_seconds"].meaning in page.texts for stage in STAGES)


def test_starts_stops_and_continuations_are_told(run):
    folder = run(has_ended=False)
    change = {"name": "max_steps", "before": "<3>", "after": "5", "is_free": True}
    events = [
        {"unix_seconds": 1763756107.5, "event": "started", "step": 0, "world_size": 2},
        {"unix_seconds": 1763756207.5, "event": "stopped", "step": 3},
    ]
    path = folder / "events.jsonl"
    path.write_text("\n".join(map(json.dumps, events)))
    written = last_write(folder)
    assert at(written + 4000, read_run, folder).status == "paused"
    shown = "\n".join(Page(render_report(folder)).texts)
    assert "2025-11-21 20:15:07 UTC" in shown
    assert "started, 2 processes" in shown
    assert "stopped by a signal after step 3, with a checkpoint" in shown
    assert "stopped with a checkpoint: the same command continues" in shown
    resumed = {"unix_seconds": "x", "event": "resumed", "step": 3, "world_size": 1}
    odd = {"event": "<b>odd", "step": 4, "unix_seconds": 1e300}
    lines = [*events, resumed | {"changes": [change, 3]}, odd, {"event": "half"}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"event": "fin')
    found = at(written + 4000, read_run, folder)
    assert found.status == "stopped"
    assert [event.sentence for event in found.events][2:] == [
        "continued after step 3, 1 process; max_steps: <3> → 5",
        "<b>odd, step 4",
    ]
    page_of(folder)

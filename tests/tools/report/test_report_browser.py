"""The report in a real browser that has no network."""

import base64
import io

import pytest
from PIL import Image
from tests.tools.report.browser import faults, needs_browser, open_browser, take_picture
from tests.tools.report.report_runs import change_lines, write_run

from lightrft.reporting.files import write_event
from lightrft.reporting.metric_table import STAGES
from lightrft.tools.report.charts import write_library
from lightrft.tools.report.page import write_report
from lightrft.tools.report.report_command import write_comparison

pytestmark = needs_browser

HOSTILE = "</script><script>window.hacked = true</script><img src=http://192.0.2.1/x onerror=x()>"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run that was killed: the last line of each file is cut off."""
    folder = tmp_path_factory.mktemp("runs") / HOSTILE.replace("/", "_")[:80]
    write_run(folder, 60, said=HOSTILE, label=HOSTILE, pretrain=HOSTILE, has_ended=False)
    rising = {f"reward/{HOSTILE}": 1.0}
    change_lines(folder, "metrics", lambda row: row | rising | {"reward": row["step"] / 60})
    tokens = {"tokens": ["\n", HOSTILE], "advantages": [1.0, -1.0], "entropy": [0.5, 0.0]}
    tokens |= {"rollout_logprobs": [-0.1, -1.0]}
    change_lines(folder, "trajectories", lambda row: row | tokens)
    for name in ("metrics", "samples", "trajectories"):
        with (folder / f"{name}.jsonl").open("r+") as file:
            first = file.readline()
            file.seek(0, 2)
            file.write(first[:40])
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


class Visit:
    """A page that was opened from disk, with what it asked for and complained about."""

    def __init__(self, browser, path, *, width=1440):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
        self.page = self.context.new_page()
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-drawn=true]", timeout=120_000)


@pytest.fixture
def visit(browser):
    opened = []

    def open_page(folder, **options):
        opened.append(Visit(browser, folder / "report.html", **options))
        return opened[-1]

    yield open_page
    for item in opened:
        item.context.close()


def test_charts_are_drawn_without_a_request_or_a_complaint(run_folder, visit):
    seen = visit(run_folder)
    page = seen.page
    assert seen.complaints == []
    assert seen.requests == [(run_folder / "report.html").as_uri()]
    plots = page.locator(".plot")
    assert plots.count() == 11
    assert page.locator(".plot .scatterlayer .trace path.js-line").count() == 11
    assert page.locator(".plot .barlayer .trace").count() == len(STAGES)
    # The reward rises all the way from the lower left to the upper right corner.
    shape = page.locator(".plot path.js-line").first.get_attribute("d")
    corners = [tuple(map(float, part.split(","))) for part in (shape[1:].split("L")) if "," in part]
    assert corners[0][0] < corners[-1][0]
    assert corners[0][1] > corners[-1][1] + 50
    assert page.evaluate("window.hacked") is None
    assert (run_folder / "report.html").stat().st_size < 5_000_000


@pytest.mark.full
def test_a_page_draws_with_the_library_beside_it_and_says_where_it_is_missing(tmp_path, browser):
    folder = write_run(tmp_path / "run")
    library = write_library(tmp_path)
    seen = Visit(browser, write_report(folder, library))
    assert seen.complaints == []
    assert seen.page.locator(".plot .js-line").count() > 5
    assert not seen.page.locator("#library-missing").is_visible()
    library.unlink()
    missing = Visit(browser, folder / "report.html")
    assert missing.page.locator("#library-missing").is_visible()
    for visit in (seen, missing):
        visit.context.close()


@pytest.mark.full
def test_tokens_are_shaded_by_the_quantity_that_is_chosen(run_folder, visit):
    page = visit(run_folder).page
    tokens = page.locator("#token-samples .token")
    assert tokens.count() == 8
    assert tokens.nth(1).text_content() == HOSTILE
    assert "advantage -1\nprobability 0.13534\nratio 0.36788\nentropy 0" in (
        tokens.nth(1).get_attribute("title")
    )

    def colours():
        script = "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
        return tokens.evaluate_all(script)

    seen = {"advantage": colours()}
    for name in ("probability", "ratio", "entropy"):
        page.select_option("#token-quantity", name)
        seen[name] = colours()
    assert len({tuple(pair) for pair in seen.values()}) == 4
    assert seen["advantage"][0] != seen["advantage"][1]
    page.select_option("#token-step", "1")
    assert tokens.count() == 8


def test_a_zoom_of_one_chart_moves_the_others(run_folder, visit):
    page = visit(run_folder).page
    area = page.locator(".plot .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, middle, steps=5)
    page.mouse.up()
    # The page's policy forbids eval, which playwright's own way of waiting needs.
    ranges = page.evaluate(
        """async () => {
            const plots = [...document.querySelectorAll(".plot")];
            const ends = () => plots.map((plot) => plot.layout.xaxis.range[0]);
            for (let i = 0; i < 200 && new Set(ends()).size > 1; i += 1) {
                await new Promise((done) => setTimeout(done, 50));
            }
            return ends();
        }"""
    )
    assert 10 < ranges[0] < 25
    assert set(ranges) == {ranges[0]}


def write_troubled_run(folder):
    """An interrupted run of conversations with pictures, which raises alarms and tells events."""
    write_run(folder, 12, label="843")
    long = "{'name': 'look', 'arguments': " + "x" * 200 + "}"
    call = {"name": "look_at_what_is_behind_the_door_of_this_name", "answer": long}
    turns = [{"said": f"turn {number} {'word ' * 60}", "calls": [call]} for number in range(4)]
    picture = Image.effect_noise((96, 48), 90).convert("RGB")
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG")
    image = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    shown = {"turns": turns, "images": [image] * 4, "truncated": True}
    change_lines(folder, "samples", lambda row: row | shown)
    bad = {"truncated_share": 0.9, "reward/" + "long_part_" * 9: 1.0, "entropy": None}
    change_lines(folder, "metrics", lambda row: row | bad)
    (folder / "summary.json").unlink()
    for name, step in (("started", 0), ("interrupted", 4), ("resumed", 4), ("interrupted", 12)):
        change = {"name": "generate_max_len", "before": "x" * 90, "after": "y" * 90}
        details = {"world_size": 2, "changes": [change | {"is_free": True}]}
        write_event(folder, name, step=step, details=details)
    return folder


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    """Reports and a comparison with long names, values and texts, by name."""
    folder = tmp_path_factory.mktemp("views")
    long = "a_name_without_a_place_to_break_" * 4
    one = write_run(folder / long, 40, pretrain=f"/data/{long}/{long}", solved_from=31, label=long)
    others = [write_run(folder / f"seed_{i}", 10 + i, best=i * 1e4, seed=i) for i in (1, 2, 3)]
    comparison = folder / "comparison.html"
    write_comparison([one, *others], comparison)
    troubled = write_report(write_troubled_run(folder / "troubled"))
    return {"report": write_report(one), "comparison": comparison, "troubled": troubled}


@pytest.mark.full
@pytest.mark.parametrize("view", ["report", "comparison", "troubled"])
def test_nothing_overlaps_on_a_phone_and_on_a_wide_screen(views, browser, view, tmp_path):
    seen = Visit(browser, views[view], width=400)
    page = seen.page
    page.evaluate("for (const list of document.querySelectorAll('details')) list.open = true")
    for width in (400, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(1000)  # charts follow the width with a delay
        found, count = faults(page)
        assert found == []
        assert count > 200
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        size, num_colours = take_picture(page, tmp_path / f"{view}_{width}.png")
        assert size[0] == width
        assert num_colours > 100
        box = page.locator(".plot").first.bounding_box()
        assert width > 400 or box["width"] > 280
        # A long name makes no row of the others' texts as high as a page.
        rows = page.locator("header tbody tr").evaluate_all(
            "rows => rows.map((row) => row.offsetHeight)"
        )
        assert max(rows, default=0) < 200
    assert seen.complaints == []
    seen.context.close()


# Where, what is done to it, and what is said about it.
PLANTED = (
    ("figcaption p", "margin-top: -40px", " | "),
    ("figure h3", "transform: translateY(30px)", " | "),
    (
        ".plot .xtick text",
        "transform: scale(30); transform-box: fill-box; transform-origin: 50% 50%",
        " | ",
    ),
    ("figcaption p", "height: 8px; overflow: hidden", "cut: "),
    ("figcaption p", "width: 40px; white-space: nowrap; overflow: clip", "cut: "),
    ("h1", "position: relative; left: -30px", "cut: "),
    ("h1", "white-space: nowrap", "cut: "),
    (".plot .ytick text", "transform: translateX(-60px)", "cut: "),
)
PLANT = """([where, style]) => {
  const node = document.querySelector(where);
  const before = node.style.cssText;
  node.style.cssText += ";" + style;
  return before;
}"""


@pytest.mark.full
def test_what_is_pushed_over_its_neighbour_or_out_of_its_box_is_found(views, browser):
    seen = Visit(browser, views["report"], width=400)
    page = seen.page
    for where, style, said in PLANTED:
        assert faults(page)[0] == []
        before = page.evaluate(PLANT, [where, style])
        assert [text for text in faults(page)[0] if said in text] != [], (where, style)
        page.evaluate(
            "([where, style]) => { document.querySelector(where).style.cssText = style }",
            [where, before],
        )
    seen.context.close()

"""The report in a real browser that has no network."""

from __future__ import annotations

import json
import shutil

import pytest

from lightrft.trainer.reporting.metric_table import STAGES
from lightrft.trainer.reporting.page import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="package playwright is not installed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is here")

HOSTILE = "</script><script>window.hacked = true</script><img src=http://192.0.2.1/x onerror=x()>"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run that was killed: the last line of each file is cut off."""
    folder = tmp_path_factory.mktemp("runs") / HOSTILE.replace("/", "_")[:80]
    folder.mkdir()
    metrics, samples, tokens = [], [], []
    for step in range(1, 61):
        row = {f"{stage}_seconds": 0.1 for stage in STAGES}
        row |= {"step": step, "reward": step / 60, "reward_std": 0.2, "constant_group_share": 0.3}
        row |= {"response_length": 20.0, "kl": 0.01 * step, "entropy": 1.0, "grad_norm": 0.5}
        row |= {"clip_fraction_low": 0.0, "clip_fraction_high": 0.1, "step_seconds": 0.6}
        metrics.append(row | {f"reward/{HOSTILE}": 1.0})
        shared = {"step": step, "prompt": HOSTILE, "reward": 1.0}
        samples.append({**shared, "response": HOSTILE, "label": HOSTILE, "response_length": 2})
        numbers = {"logprobs": [-0.1, -2.0], "rollout_logprobs": [-0.1, -1.0]}
        numbers |= {"advantages": [1.0, -1.0], "entropy": [0.5, 0.0]}
        tokens.append({**shared, "tokens": ["\n", HOSTILE], **numbers})
    for name, rows in (("metrics", metrics), ("samples", samples), ("trajectories", tokens)):
        whole = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(whole + json.dumps(rows[0])[:40])
    (folder / "config.toml").write_text(f"pretrain = '{HOSTILE}'\n")
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # The sandbox needs privileges that containers do not give.
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        opened = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        yield opened
        opened.close()


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
    assert plots.count() == 9
    assert page.locator(".plot .scatterlayer .trace path.js-line").count() == 9
    assert page.locator(".plot .barlayer .trace").count() == len(STAGES)
    # The reward rises all the way from the lower left to the upper right corner.
    shape = page.locator(".plot path.js-line").first.get_attribute("d")
    corners = [tuple(map(float, part.split(","))) for part in (shape[1:].split("L")) if "," in part]
    assert corners[0][0] < corners[-1][0]
    assert corners[0][1] > corners[-1][1] + 50
    assert page.evaluate("window.hacked") is None
    assert (run_folder / "report.html").stat().st_size < 5_000_000


def test_tokens_are_shaded_by_the_quantity_that_is_chosen(run_folder, visit):
    page = visit(run_folder).page
    tokens = page.locator("#token-samples .token")
    assert tokens.count() == 2
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
    assert tokens.count() == 2


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


def test_a_narrow_window_does_not_scroll_sideways(run_folder, visit):
    page = visit(run_folder, width=390).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator(".plot").first.bounding_box()["width"] > 280

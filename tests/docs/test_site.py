"""The site: every page is built, can be searched, and asks nothing of other hosts."""

import re
import shutil
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.programs import run_python

pytest.importorskip("material", reason="the group docs is not installed: uv sync --group docs")
ROOT = Path(__file__).resolve().parents[2]
# What newcomers type, with a page that answers it.
QUERIES = """
loss long answers: troubleshooting
train_batch_size: troubleshooting
how do I resume: troubleshooting
rollouts pandas: after_a_run
logprob_diff: metrics
adapter vllm: troubleshooting
GPU for 7B: troubleshooting
curriculum: troubleshooting
reward flat: troubleshooting
sent over network: troubleshooting
KL penalty: troubleshooting
reward hacking: troubleshooting
hyperparameter: algorithms
early stopping: troubleshooting
tool calling: environments
function calling: environments
gradient accumulation: scaling
mixed precision: troubleshooting
multi-GPU: one_node
deploy: after_a_run
debugging: troubleshooting
FAQ: troubleshooting
tutorial: first_reward
system prompt: data_formats
out of memory: one_gpu
multi-turn: environments
fp16: troubleshooting
notebook: notebooks/first_reward
VRAM: troubleshooting
privacy: troubleshooting
telemetry: troubleshooting
phone home: troubleshooting
dataframe: troubleshooting
continue training: troubleshooting
restart: troubleshooting
checkpoint: troubleshooting
reward stuck: troubleshooting
reward zero: troubleshooting
reward not increasing: troubleshooting
batch size: troubleshooting
easy to hard: troubleshooting
engine mismatch: troubleshooting
which GPU: troubleshooting
GPU memory: troubleshooting
long reasoning: troubleshooting
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    run_python(
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        folder,
        timeout_seconds=200,
        cwd=ROOT,
        code=0,
    )
    return folder


def test_every_page_is_there_and_can_be_searched(site):
    docs = ROOT / "docs"
    files = [*docs.rglob("*.md"), *docs.rglob("*.ipynb")]
    pages = {path.relative_to(docs).with_suffix("") for path in files}
    folders = {path.relative_to(site).parent for path in site.rglob("index.html")}
    assert {path.parent if path.name == "index" else path for path in pages} == folders
    index = (site / "search/search_index.json").read_text()
    assert '"glossary/"' in index
    assert "staleness" in index


@pytest.mark.full
def test_the_first_three_hits_answer_what_newcomers_type(site):
    playwright = pytest.importorskip("playwright.sync_api", reason="the group browser is missing")
    program = shutil.which("chromium") or pytest.skip("chromium is not here")
    with (
        ThreadingHTTPServer(
            ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=site)
        ) as server,
        playwright.sync_playwright() as d,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        page = d.chromium.launch(executable_path=program, args=["--no-sandbox"]).new_page()
        for query, answer in re.findall("(.+): (.+)", QUERIES):
            page.goto(f"http://127.0.0.1:{server.server_port}/?q={query}")
            page.wait_for_selector(".md-search-result__item a")
            hits = page.locator(".md-search-result__item").evaluate_all(
                "items => items.slice(0, 3).map(item => item.querySelector('a').pathname)"
            )
            assert f"/{answer}/" in hits, (query, hits)
        server.shutdown()


def test_pages_load_nothing_from_other_hosts_and_show_no_markup(site):
    wrong = r'<(?:script|img|link)[^>]* (?:src|href)="https?:[^"]+"|\\\||::: lightrft'
    for page in site.rglob("*.html"):
        assert re.findall(wrong, page.read_text()) == [], page


BROKEN = """() => {
  const body = document.documentElement;
  const texts = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  const broken = body.scrollWidth > body.clientWidth ? ["the page is too wide"] : [];
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const pre = text.parentElement.closest("pre > code");
    if (pre && pre.scrollWidth > pre.clientWidth + 1) broken.push(pre.textContent);
    if (!text.parentElement.closest("td, th, .option")) continue;
    for (const word of text.data.matchAll(/[\\w.:]+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) broken.push(word[0]);
    }
  }
  return broken;
}"""
LOOKED_AT = ("after_a_run", "configuration", "environments", "errors", "notebooks/sft_to_grpo")


@pytest.mark.full
def test_no_command_is_cut_and_no_name_of_a_table_broken(site):
    from tests.tools.report.browser import open_browser

    with open_browser() as browser:
        for width in (1280, 400):
            page = browser.new_page(viewport={"width": width, "height": 900})
            for name in LOOKED_AT:
                page.goto((site / name / "index.html").as_uri())
                assert page.evaluate(BROKEN) == [], (name, width)
        page.goto((site / "errors/index.html").as_uri())
        page.add_style_tag(content=".md-typeset td code {word-break: break-all}")
        page.add_style_tag(content=".md-typeset table {table-layout: fixed; width: 100%}")
        assert "UNEXPECTED" in page.evaluate(BROKEN)

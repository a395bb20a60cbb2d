"""The site: every page is built, can be searched, and asks nothing of other hosts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.programs import run_python

pytest.importorskip("material", reason="the group docs is not installed: uv sync --group docs")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = run_python(
        "-m", "mkdocs", "build", "--strict", "--site-dir", folder, timeout_seconds=200, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_every_page_is_there_and_can_be_searched(site):
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).with_suffix("") for path in docs.rglob("*.md")}
    folders = {path.relative_to(site).parent for path in site.rglob("index.html")}
    assert {path.parent if path.name == "index" else path for path in pages} == folders
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {
        entry["location"].split("/")[0]
        for entry in index["docs"]
        if "staleness" in entry["text"].lower()
    }
    assert {"glossary", "scaling"} <= found


def test_pages_load_nothing_from_other_hosts_and_show_no_markup(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|link)[^>]* (?:src|href)="(https?:[^"]+)"', text)
        assert loaded == [], page
        assert r"\|" not in text, page
        assert "::: lightrft" not in text, page

"""The notebooks of the pages run in a minute, and what they train learns."""

import json
import time

import pytest
from tests.docs.test_pictures import DOCS
from tests.machine import seconds
from tests.programs import load_script

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbclient and ipykernel")
BOOKS = sorted(path.stem for path in (DOCS / "notebooks").glob("*.ipynb"))


def read(name):
    return nbformat.read(DOCS / "notebooks" / f"{name}.ipynb", as_version=4)


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_is_short_and_has_the_outputs_of_a_whole_run(name):
    book = read(name)
    assert len(book.cells) <= 15
    assert (DOCS / "notebooks" / f"{name}.ipynb").stat().st_size < 150_000
    counts = [cell.execution_count for cell in book.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)], f"run: python docs/notebooks.py {name}"
    assert "/site-packages/" not in json.dumps(book)


def test_a_page_has_cells_and_outputs_of_which_long_ones_are_cut():
    cell = nbformat.v4.new_code_cell("for n in range(40): print(n)")
    text = "".join(f"{n}\n" for n in range(40))
    cell.outputs = [nbformat.v4.new_output("stream", text=text)]
    head = nbformat.v4.new_markdown_cell("# Title\n\nAfter this page.")
    page = load_script(DOCS / "notebooks.py").page(
        nbformat.v4.new_notebook(cells=[head, cell]), "book"
    )
    assert page.startswith("# Title\n\n[The notebook as a file](book.ipynb)\n\nAfter this page.\n")
    assert "```python\nfor n" in page
    assert "\n7\n[24 lines left out]\n32\n" in page


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_trains_within_a_minute(name, tmp_path):
    limit, start = seconds(60), time.monotonic()
    load_script(DOCS / "notebooks.py").execute(read(name), tmp_path, timeout_seconds=limit)
    assert time.monotonic() - start < limit
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rewards = [row["reward"] for row in map(json.loads, lines) if "reward" in row]
    assert rewards[-1] > rewards[0] + 0.3

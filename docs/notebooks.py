"""The notebooks of docs/notebooks: pages of the site, and runs of their cells.

    python docs/notebooks.py [NAME ...]     runs all, or some, and keeps what they printed

As a hook of mkdocs it makes a page of each notebook, beside which the notebook itself lies.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

FOLDER = Path(__file__).resolve().parent / "notebooks"
MOST_LINES = 16  # of an output on a page, its first and its last; the file has all


def page(notebook: nbformat.NotebookNode, name: str) -> str:
    """Return a notebook as Markdown, its title first, then a link to the file."""
    first, *others = notebook.cells
    title, _, text = first.source.partition("\n")
    parts = [f"{title}\n\n[The notebook as a file]({name}.ipynb)\n{text}"]
    for cell in others:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += [shown for each in cell.outputs if (shown := _shown(each))]
    return "\n\n".join(parts) + "\n"


def _shown(output: nbformat.NotebookNode) -> str:
    """Return an output of a cell as Markdown."""
    kinds = output.get("data", {})
    if "text/html" in kinds:
        return f'<div class="output">{kinds["text/html"]}</div>'
    lines = (output.get("text") or kinds.get("text/plain", "")).rstrip().splitlines()
    if len(lines) > MOST_LINES + 4:
        left_out = f"[{len(lines) - MOST_LINES} lines left out]"
        lines = [*lines[: MOST_LINES // 2], left_out, *lines[-MOST_LINES // 2 :]]
    return "\n".join(["```text", *lines, "```"]) if lines else ""


def execute(notebook: nbformat.NotebookNode, folder: Path, *, timeout_seconds: float) -> None:
    """Run the cells in a folder; their outputs become those of the notebook.

    Raises:
        CellExecutionError: A cell failed.
        CellTimeoutError: A cell took longer.
    """
    from nbclient import NotebookClient

    place, limit = {"metadata": {"path": str(folder)}}, int(timeout_seconds)
    client = NotebookClient(notebook, timeout=limit, resources=place, record_timing=False)
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return outputs with each stream in one piece, without warnings of libraries."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if kept and output.output_type == kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook; called by mkdocs."""
    from mkdocs.structure.files import File

    for path in sorted(FOLDER.glob("*.ipynb")):
        content = page(nbformat.read(path, as_version=4), path.stem)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
    return files


def main(names: list[str]) -> None:
    """Run notebooks and write them back with their outputs."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            notebook = nbformat.read(path, as_version=4)
            with tempfile.TemporaryDirectory() as folder:
                execute(notebook, Path(folder), timeout_seconds=600)
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The chain of runs that a run came from, by the hashes that each run recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightrft.reporting.files import START_FILE, read_json

ROLES = {
    "pretrain": "starts from",
    "teacher": "teacher",
    "critic_pretrain": "critic",
    "reward_pretrain": "reward model",
}
SHOWN_DIGITS = 12
# A longer chain comes from a damaged record.
MAX_DEPTH = 30


@dataclass(slots=True)
class Node:
    """A run, a model or a file, with its sources.

    Args:
        text: Line of text.
        sources: Sources in the order of the record.
    """

    text: str
    sources: list[Node] = field(default_factory=list)

    def lines(self, first: str = "", rest: str = "") -> Iterator[str]:
        """Yield the tree as text, one node a line."""
        yield first + self.text
        for number, node in enumerate(self.sources, start=1):
            is_last = number == len(self.sources)
            yield from node.lines(
                rest + ("└─ " if is_last else "├─ "), rest + ("   " if is_last else "│  ")
            )


def chain_of(folder: Path) -> list[str]:
    """Return lines of the run in a folder and, below it, its data and models and their runs.

    A folder that is gone or holds another run ends its branch with a note. A run that occurs twice
    is followed once. A run without recorded hashes has only its line.
    """
    start = read_json(folder / START_FILE)
    return list(_run_node(folder.resolve(), start, set(), 0).lines())


def _run_node(folder: Path, start: Mapping[str, object], seen: set[str], depth: int) -> Node:
    digest = str(start.get("run_sha256") or "")
    node = Node(_named(folder.name, str(start.get("stage") or "run"), digest))
    if digest in seen or depth >= MAX_DEPTH:
        node.text += ", as above"
        return node
    seen.add(digest)
    for role, entry in _entries(start.get("models")):
        name, _, number = role.partition(" ")
        words = " ".join(filter(None, (ROLES.get(name, name), number)))
        weights = str(entry.get("weights_sha256") or "")
        made = Node(f"{words}: {_shown(Path(str(entry.get('path'))), 'weights', weights)}")
        run = entry.get("run")
        if isinstance(run, Mapping):
            if not run.get("is_unchanged"):
                made.text += ", changed since its run"
            made.sources.append(_linked(run, seen, depth + 1))
        node.sources.append(made)
    for path_text, entry in _entries(start.get("inputs")):
        digest = str(entry.get("sha256") or "")
        made = Node(f"reads: {_shown(Path(path_text), 'SHA-256', digest)}")
        run = entry.get("run")
        if isinstance(run, Mapping):
            made.sources.append(_linked(run, seen, depth + 1))
        node.sources.append(made)
    return node


def _linked(run: Mapping[str, object], seen: set[str], depth: int) -> Node:
    """Return the node of the run that a model or a file names, where it still exists."""
    folder, digest = Path(str(run.get("path"))), str(run.get("run_sha256") or "")
    start = read_json(folder / START_FILE)
    if start and start.get("run_sha256") == digest:
        return _run_node(folder, start, seen, depth)
    why = "another run is in its folder now" if start else "its folder is gone"
    return Node(f"{_named(folder.name, str(run.get('stage') or 'run'), digest)}, {why}")


def _entries(values: object) -> Iterator[tuple[str, Mapping[str, object]]]:
    for name, entry in values.items() if isinstance(values, Mapping) else ():
        if isinstance(entry, Mapping):
            yield str(name), entry


def _named(name: str, stage: str, digest: str) -> str:
    return f"{name} ({stage}{f', {digest[:SHOWN_DIGITS]}' if digest else ''})"


def _shown(path: Path, what: str, digest: str) -> str:
    """Return the last two parts of a path, and a hash if there is one."""
    name = "/".join(path.parts[-2:])
    return f"{name}, {what} {digest[:SHOWN_DIGITS]}" if digest else name

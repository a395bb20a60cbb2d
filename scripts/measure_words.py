r"""Measures of prose, each of which is to be no worse than `accepted_words.toml` says.

    python scripts/measure_words.py [ROOT]          measures of the tree at ROOT, by default this
    python scripts/measure_words.py [ROOT] --list   names the places that are counted, too

vague_words: found, told, given and own as words or parts of names, in Python files of `packages`.
noun_docstrings: docstrings of functions that begin with no verb: with an article, a pronoun, a
    preposition, a question word or a number; of properties, with a question word.
vague_parameters: parameters whose description begins with Of, Those, Whether these or The same.
documented_words: words of README, docs and notebooks, without code, tables of options and metrics,
    and what `docs/generate.py` writes.
words_per_sentence: mean of the running text of README and docs, in tenths.
architecture_words: words of ARCHITECTURE.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ACCEPTED = "scripts/accepted_words.toml"
_VAGUE = re.compile(r"(?<![A-Za-z])(found|told|given|own)(?![A-Za-z])", re.IGNORECASE)
# Words that begin no imperative sentence: the closed classes of English.
_NO_VERB = re.compile(
    r"(a|an|the|all|each|every|both|some|any|no|one|two|its|his|their|this|that|these|those|it|they"
    r"|whose|who|what|which|where|when|why|how|whether|if|of|in|on|at|by|as|for|from|with|without"
    r"|within|until|under|between|after|before|to|into|only|not|like|see)\b",
    re.IGNORECASE,
)
_QUESTION = re.compile(r"(who|whose|what|which|where|when|why|how|whether)\b", re.IGNORECASE)
_PARAMETER = re.compile(r"^ +\w[\w, *]*: (?:Of|Those|Whether these|The same)\b", re.MULTILINE)
_GENERATED = re.compile(r"<!-- written by docs/generate.py -->.*?<!-- end -->", re.DOTALL)
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_TABLES = ("api.md", "configuration.md", "metrics.md")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and text of each Python file of the packages at `root`."""
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        yield str(path.relative_to(root)), path.read_text(encoding="utf-8")


def code_places(root: Path) -> dict[str, list[str]]:
    """Return the places of each measure of code."""
    vague, nouns, parameters = [], [], []
    for path, text in read_sources(root):
        for number, line in enumerate(text.splitlines(), 1):
            vague += [f"{path}:{number} {word}" for word in _VAGUE.findall(line)]
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, _Function | ast.ClassDef | ast.Module):
                continue
            docstring = ast.get_docstring(node) or ""
            place = f"{path}:{getattr(node, 'lineno', 1)}"
            parameters += [place for _ in _PARAMETER.findall(docstring)]
            if isinstance(node, _Function):
                wrong = _QUESTION if _is_attribute(node) else _NO_VERB
                nouns += [f"{place} {node.name}"] if wrong.match(docstring) else []
    return {"vague_words": vague, "noun_docstrings": nouns, "vague_parameters": parameters}


def _is_attribute(function: _Function) -> bool:
    """Return whether callers see a value, which a noun describes."""
    return any("property" in ast.unparse(each) for each in function.decorator_list)


def pages(root: Path) -> dict[str, str]:
    """Return the text of README and the pages of docs, without code and generated parts."""
    files = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files if path.exists()}
    for path in sorted((root / "docs").rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        words = ["".join(each["source"]) for each in cells if each["cell_type"] == "markdown"]
        texts[path.name] = "\n\n".join(words)
    return {
        name: _CODE.sub("", _GENERATED.sub("", text))
        for name, text in texts.items()
        if name not in _TABLES
    }


def sentence_lengths(text: str) -> list[int]:
    """Return the number of words of each sentence outside tables, headings and links' targets."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "!["))]
    running = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    sentences = re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*(?:[-*]|\d+\.) ", running)
    return [len(words) for each in sentences if len(words := re.findall(r"[\w`'-]+", each)) > 2]


def measure(root: Path) -> dict[str, tuple[int, list[str]]]:
    """Return each measure with the places that it counts, where it counts places."""
    texts = pages(root)
    lengths = [length for text in texts.values() for length in sentence_lengths(text)]
    by_page = [f"{name} {len(text.split()):,d}" for name, text in texts.items()]
    architecture = root / "ARCHITECTURE.md"
    words = len(architecture.read_text(encoding="utf-8").split()) if architecture.exists() else 0
    return {
        **{name: (len(places), places) for name, places in code_places(root).items()},
        "documented_words": (sum(len(text.split()) for text in texts.values()), by_page),
        "words_per_sentence": (round(10 * sum(lengths) / max(1, len(lengths))), []),
        "architecture_words": (words, []),
    }


def read_accepted(root: Path) -> dict[str, int]:
    """Return the accepted value of each measure.

    A table `[added."CAPABILITY"]` adds its numbers to the others and says its `reason`.
    """
    with open(root / ACCEPTED, "rb") as file:
        accepted = tomllib.load(file)
    for costs in accepted.pop("added", {}).values():
        if not costs.pop("reason").strip():
            raise ValueError(f"{ACCEPTED}: each capability says its reason")
        for name, words in costs.items():
            accepted[name] += words
    return accepted


def main() -> None:
    """Print the measures beside what is accepted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("root", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    accepted = read_accepted(args.root)
    for name, (value, places) in measure(args.root).items():
        print(f"{value:8,d}  accepted {accepted.get(name, 0):8,d}  {name}")
        if args.list:
            print("\n".join(f"          {place}" for place in places))


if __name__ == "__main__":
    main()

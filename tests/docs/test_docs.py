"""The pages of docs: every block runs, generated pages follow from the code, links lead on."""

import itertools
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from tests.programs import load_script, run_program

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import COMMANDS, main
from lightrft.config.other_names import OTHER_NAMES
from lightrft.tools.model_presets import write_tiny_model

pytestmark = pytest.mark.shard("quickstart")

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
LANGUAGES = {"bash", "python", "text"}
# What takes seconds runs by default, what trains a model with the slow tests.
CHEAP = (
    "errors.md",
    "data_formats.md",
    "extending.md",
    "from_trl.md",
    "library.md",
    "rewards.md",
)


OF_OTHERS = re.compile(r"^```text\n.*?^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """Language and text of each block."""
    return BLOCK.findall(PAGES[page])


COSTLY = [page for page in PAGES if page not in CHEAP and dict(blocks(page)).keys() - {"text"}]


def run_page(page, folder):
    """Runs the blocks of a page one after another in one folder.

    Substitutions: `lightrft` and `torchrun` are those of this environment. A Python block whose
    first line is a comment with a file name is written to that file.
    """
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{bin_folder}{os.pathsep}{environment['PATH']}"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    for language, text in blocks(page):
        if language == "text":
            continue
        name = re.match(r"# (\w+\.py)\n", text)
        if language == "python" and name:
            (folder / name[1]).write_text(text)
            continue
        program = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else None
        run_program(
            *(program or [sys.executable, "-c", text]),
            cwd=folder,
            env=environment,
            timeout_seconds=1500,
            code=0,
        )


def test_every_block_has_a_language_and_an_end():
    for page, text in PAGES.items():
        assert dict(blocks(page)).keys() <= LANGUAGES
        assert text.count("```") == 2 * len(BLOCK.findall(text))


@pytest.mark.full
@pytest.mark.parametrize("page", CHEAP)
def test_a_cheap_page_runs(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", COSTLY)
def test_a_costly_page_runs(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", [*CHEAP, *COSTLY])
def test_every_bash_block_parses_and_names_known_commands(page):
    for language, text in blocks(page):
        if language == "bash":
            run_program("bash", "-n", "-c", text, code=0)
        commands = re.findall(r"^lightrft ([a-z][\w-]*)", text, flags=re.MULTILINE)
        assert set(commands) <= set(COMMANDS), text


@pytest.mark.parametrize("page", [*CHEAP, *COSTLY, "recipes.md"])
def test_every_flag_in_the_text_exists(page):
    from lightrft.tools.completion_command import whole_parser

    known = {"--rdzv-backend", "--rdzv-endpoint", "--nnodes", "--help"}
    known |= {"--pretrian"}  # a misspelling, which is shown on purpose
    known |= {"--bind", "--directory", "--enable-lora", "--lora-modules"}  # of Python and vLLM
    if page.startswith("from_"):
        known |= {f"--{name.partition('.')[0]}" for name in OTHER_NAMES}
    parsers = [whole_parser(COMMANDS)]
    for parser in parsers:
        for action in parser._actions:
            known |= set(action.option_strings)
            parsers += action.choices.values() if isinstance(action.choices, dict) else []
    # A command of another project is a block of text.
    own = PAGES[page] if not page.startswith("from_") else OF_OTHERS.sub("", PAGES[page])
    found = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", own))
    assert found - known == set()


@pytest.fixture(scope="module")
def generate():
    """The module docs/generate.py."""
    return load_script(DOCS / "generate.py")


def test_generated_pages_follow_from_the_code(generate):
    for name, make in generate.PAGES.items():
        written = (generate.FOLDER / name).read_text(encoding="utf-8")
        assert written == make(), "run: uv run python docs/generate.py"


def test_every_exit_code_is_explained():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGES["errors.md"], flags=re.MULTILINE)
    assert rows == [(str(int(code)), code.name) for code in ExitCode]


def test_links_and_the_navigation_lead_to_pages():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert target in PAGES or target.startswith("https:") or (DOCS / target).is_file(), (
                f"{page}: {target}"
            )
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    assert sorted(re.findall(r": (\w+\.md)\n", navigation)) == [*PAGES]


def test_every_page_ends_by_naming_the_next():
    navigation = (DOCS.parent / "mkdocs.yml").read_text().split("nav:")[1]
    groups = re.split(r"\n  - ([\w-]+):", navigation)[1:]
    assert groups[::2] == ["Start", "Tutorials", "How-to", "Concepts", "Reference", "Project"]
    assert max(group.count("\n    - ") for group in groups) == 8
    pages = re.findall(r": (\w+\.md)\n", navigation)
    path = ["index.md", *re.findall(r"\n\| \[[^]]+\]\((\w+\.md)\)", PAGES["index.md"])]
    assert [page for page in pages if page in path] == path
    for page, following in itertools.pairwise(pages):
        if page not in ("configuration.md", "api.md", "metrics.md"):  # looked up, not read
            assert re.search(rf"\n\nNext: \[.+\]\({following}\)\.\n$", PAGES[page]), page


def test_every_page_begins_by_saying_what_its_reader_can_do():
    for page in DOCS.rglob("*.md"):
        assert re.match(
            r"(---\n.*\n---\n\n)?# .+\n\n(<!-- .* -->\n\n|lightrft is [^.]+\. )?After this page ",
            page.read_text(),
        ), page


def test_every_fact_about_another_project_names_a_source_that_is_listed():
    facts, sources = PAGES["comparison.md"].split("## Sources")
    listed = set(
        re.findall(r"^\| ([A-Z]\d) \| [^|]+ \| <https://[^>]+> \|$", sources, re.MULTILINE)
    )
    marks = r"(?<![-\w])([TVOSPMNKA]\d)\b"
    used = set(re.findall(marks, facts))
    assert used == listed
    assert len(listed) == sources.count("\n| ") - 1
    lines = [line for line in facts.splitlines() if line.startswith("| ")]
    heads = [
        "| | lightrft | TRL | verl | OpenRLHF | slime | prime-rl |",
        "| | ms-swift | NeMo-RL | SkyRL | AReaL |",
    ]
    assert [line for line in lines if line.startswith("| | ")] == heads
    own_columns = 2
    for line in lines:
        if line.startswith("| | "):
            own_columns = 2 if "lightrft" in line else 1
        elif line.startswith("| TRL |"):
            break
        else:
            for cell in line.split(" | ")[own_columns:]:
                assert "not stated" in cell or re.search(marks, cell), (line, cell)
    assert re.search(r"Read on \d{4}-\d\d-\d\d", facts)


def rows_of_data_formats():
    table = PAGES["data_formats.md"].split("## Sources")[0]
    cells = re.findall(r"^\| ([^|]+) \| `(\{.*?\})` \| (`[^|]*`)? *\|$", table, flags=re.MULTILINE)
    return [(what.strip(), row, options.strip("`")) for what, row, options in cells]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("docs") / "model"
    write_tiny_model(path, "tiny-qwen3", seed=0)
    return str(path)


def test_the_table_of_rows_is_read_whole():
    table = PAGES["data_formats.md"].split("## Sources")[0]
    assert len(rows_of_data_formats()) == table.count("\n| ") - 1 >= 10


@pytest.mark.parametrize("what, row, options", rows_of_data_formats())
def test_every_literal_row_is_accepted_with_its_options(
    what, row, options, tmp_path, monkeypatch, model, capsys
):
    json.loads(row)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text(row + "\n")
    chosen = ["--pretrain", model, *shlex.split(options)]
    assert main(["data", "check", "p.jsonl", *chosen]) == 0, what
    shown = capsys.readouterr().out
    assert "proposed options: none, the keys fit" in shown
    assert "1 prompts can be trained on" in shown


def test_every_statement_on_security_names_tests_that_exist():
    root = DOCS.parent
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGES["security.md"])
    assert len(named) > 20
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^def {name}\(", (root / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []
    is_held, untested = False, []
    for line in PAGES["security.md"].splitlines():
        if line.startswith("|") and "tested by" in line:
            is_held = True
        elif not line.startswith("|"):
            is_held = False
        elif is_held and "---" not in line and "tests/" not in line:
            untested.append(line)
    assert untested == []

"""Pictures of the pages: those that are drawn follow from their scripts, the recording plays."""

from pathlib import Path

import pytest
from tests.programs import load_script

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [path.read_text("utf-8") for path in (DOCS.parent / "README.md", *DOCS.glob("*.md"))]


@pytest.mark.parametrize("script", ["draw", "play"])
def test_pictures_follow_from_their_script(script):
    module = load_script(DOCS / f"{script}.py")
    for name, picture in module.PICTURES.items():
        drawn = picture() if script == "play" else picture().svg()
        assert (module.FOLDER / name).read_text("utf-8") == drawn, f"run: python docs/{script}.py"


def test_every_picture_is_on_a_page_and_small():
    for path in (DOCS / "pictures").iterdir():
        assert any(f"pictures/{path.name})" in text for text in PAGES), path.name
        assert path.stat().st_size < 150_000, path.name


def test_a_terminal_keeps_what_was_shown_long_enough_to_be_read():
    terminal = load_script(DOCS / "play.py").Terminal(height=2)
    terminal.write(0.0, "bar 1")
    terminal.write(0.5, "\r\x1b[2Kbar 2")
    terminal.write(0.52, "\r\x1b[2Kone\r\nbar 3")
    terminal.write(0.9, "\r\n\x1b[?25h\r\x1b[1A\x1b[2Ktwo")
    assert terminal.shown == [[(0.0, "bar 1"), (0.5, "one")], [(0.52, "bar 3"), (0.9, "two")]]
    with pytest.raises(ValueError, match="unknown control sequence"):
        terminal.write(1.0, "\x1b[3B")


@pytest.mark.full
def test_the_recording_plays_by_its_clock():
    from tests.tools.report.browser import open_browser

    at = """(t) => { document.getAnimations().forEach((a) => { a.pause(); a.currentTime = t; });
      return [...document.querySelectorAll("text")].filter((e) => getComputedStyle(e).visibility
        === "visible" && e.getBoundingClientRect().top > 0).map((e) => e.textContent).join(); }"""
    with open_browser() as browser:
        page = browser.new_page()
        page.goto((DOCS / "pictures/quickstart.svg").as_uri())
        terminal, length = load_script(DOCS / "play.py").read(DOCS / "quickstart.cast")
        for seconds in (0.5, length / 2, length - 2, length - 0.01):
            lines = [[t for s, t in line if s <= seconds] for line in terminal.shown]
            shown = [line[-1] for line in lines if line][-terminal.height :]
            assert page.evaluate(at, 1000 * seconds) == ",".join(shown), seconds

"""The recorded quick start as pictures: `python docs/play.py` writes docs/pictures.

`quickstart.svg` plays docs/quickstart.cast once, by the clock of the recording, and stays at the
last screen, which `console.svg` shows alone. Neither needs a script, nor other files.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "pictures"
ADVANCE, LEADING, MARGIN = 8.43, 19, 14  # pixels of a character, of a line, around the text
SHORTEST = 0.1  # seconds that a text is shown at least, or it is left out
STYLE = (
    'text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;'
    "fill:#e6edf3;white-space:pre}.past{visibility:hidden}"
)
_PARTS = re.compile(r"\x1b\[([?\d]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


@dataclass
class Terminal:
    """The lines that a recording has written, each with its texts and when they were shown.

    Args:
        height: Lines of the screen.
        shown: For each line from the first, (seconds, text) of each change.
        row: Line of the cursor, from the first.
        column: Place of the cursor in it.
    """

    height: int
    shown: list[list[tuple[float, str]]] = field(default_factory=list)
    row: int = 0
    column: int = 0

    def write(self, seconds: float, text: str) -> None:
        """Carry out what a program wrote to the terminal.

        Raises:
            ValueError: The text has a control sequence that is not known here.
        """
        for part in _PARTS.finditer(text):
            argument, command = part[1], part[2]
            if part[0] == "\r":
                self.column = 0
            elif part[0] == "\n":
                self.row += 1
            elif command == "A":
                self.row -= int(argument or 1)
            elif command == "K" and argument == "2":
                self.show(seconds, "")
            elif command in ("h", "l") and argument == "?25":  # shows or hides the cursor
                continue
            elif command:
                raise ValueError(f"unknown control sequence {part[0]!r}: teach it to docs/play.py")
            else:
                line, end = self.line(self.row).ljust(self.column), self.column + len(part[0])
                self.show(seconds, line[: self.column] + part[0] + line[end:])
                self.column = end

    def line(self, row: int) -> str:
        """Return what a line shows now."""
        return self.shown[row][-1][1] if row < len(self.shown) and self.shown[row] else ""

    def show(self, seconds: float, text: str) -> None:
        """Note the new text of the cursor's line, in place of one that nobody could read."""
        while len(self.shown) <= self.row:
            self.shown.append([])
        changes = self.shown[self.row]
        if changes and seconds - changes[-1][0] < SHORTEST:
            seconds = changes.pop()[0]
        if text.rstrip() != self.line(self.row):
            changes.append((seconds, text.rstrip()))


def read(path: Path) -> tuple[Terminal, float]:
    """Return what a recording shows, below the command that was typed, and its seconds."""
    header, *events = map(json.loads, path.read_text("utf-8").splitlines())
    terminal = Terminal(header["height"])
    terminal.write(0.0, f"$ {header['command']}\r\n")
    for seconds, _, text in events:
        terminal.write(seconds, text)
    while not terminal.line(len(terminal.shown) - 1):
        terminal.shown.pop()
    return terminal, events[-1][0]


def draw(terminal: Terminal, length: float | None) -> str:
    """Return the SVG of a terminal: its last screen, or all of it as an animation.

    Args:
        terminal: What was shown.
        length: Seconds of the animation, which is played once.
    """
    width = max(len(text) for changes in terminal.shown for _, text in changes)
    wide, high = round(width * ADVANCE) + 2 * MARGIN, terminal.height * LEADING + 2 * MARGIN
    count = len(terminal.shown)
    rules, lines = [STYLE], []

    def animate(steps: list[tuple[float, str]], last: str) -> str:
        """Return the attribute of an element whose style changes at these seconds."""
        frames = "".join(f"{100 * at / length:.2f}%{{{style}}}" for at, style in steps)
        rules.append(f"@keyframes k{len(rules)}{{{frames}to{{{last}}}}}")
        return f' style="animation-name:k{len(rules) - 1}"'

    for row, changes in enumerate(terminal.shown):
        for place, (start, text) in enumerate(changes):
            is_last = place == len(changes) - 1
            is_seen = row >= count - terminal.height if length is None else True
            if not text or not is_seen or (length is None and not is_last):
                continue
            attributes = "" if is_last else ' class="past"'
            if length is not None and (start or not is_last):
                steps = [(0.0, "visibility:hidden")] if start else []
                steps.append((start, "visibility:visible"))
                if not is_last:
                    steps.append((changes[place + 1][0], "visibility:hidden"))
                last = "visible" if is_last else "hidden"
                attributes += animate(steps, f"visibility:{last}")
            top = MARGIN + 14 + LEADING * row
            span = f'textLength="{len(text) * ADVANCE:.1f}" lengthAdjust="spacingAndGlyphs"'
            lines.append(f'<text x="{MARGIN}" y="{top}" {span}{attributes}>{escape(text)}</text>')
    lift = LEADING * max(0, count - terminal.height)
    moved = ""
    if length is not None:
        rules.append(
            f"[style]{{animation:{length:.1f}s step-end}}"
            "@media(prefers-reduced-motion){[style]{animation:none!important}}"
        )
        starts = [min(changes)[0] for changes in terminal.shown[terminal.height :]]
        steps = [(0.0, "transform:none")]
        for number, start in enumerate(starts, 1):
            steps.append((start, f"transform:translateY(-{number * LEADING}px)"))
        moved = animate(steps, f"transform:translateY(-{lift}px)")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" role="img" aria-label="The console of lightrft quickstart">'
        f"<style>{''.join(rules)}</style>"
        f'<rect width="{wide}" height="{high}" rx="8" fill="#0d1117"/>'
        f'<clipPath id="screen"><rect y="{MARGIN}" width="{wide}" '
        f'height="{terminal.height * LEADING}"/></clipPath><g clip-path="url(#screen)">'
        f'<g transform="translate(0 -{lift})"{moved}>\n' + "\n".join(lines) + "\n</g></g></svg>\n"
    )


def still() -> str:
    """Return the last screen of the recording."""
    return draw(read(DOCS / "quickstart.cast")[0], None)


def animation() -> str:
    """Return the recording as an animation."""
    return draw(*read(DOCS / "quickstart.cast"))


PICTURES = {"console.svg": still, "quickstart.svg": animation}

if __name__ == "__main__":
    for name, make in PICTURES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")

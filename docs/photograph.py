"""Takes the pictures of a run's report that the pages show, in a browser without a network.

    python docs/photograph.py [RUN] [FOLDER]

RUN is the folder of a run with a report; without one the quick start is run, which takes a minute.
The pictures are written to FOLDER, by default docs/pictures. Needs the groups dev and browser, and
Chromium.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).resolve().parent / "pictures"
WIDTH, SCALE, COLOURS = 960, 1.5, 128
MOST_BYTES = 150_000
# Where each picture begins and ends on the page, as what a selector names.
PICTURES = {
    "report_curves.png": ("h1", ".charts figure:nth-child(4)"),
    "report_time.png": ("#time", "#time ~ details ~ details"),
    "report_tokens.png": ("#tokens", "#config"),
}


def take(page: Page, first: str, end: str) -> bytes:
    """Return the PNG of the page from the top of an element to just above another one."""
    top, bottom = (page.locator(name).first.bounding_box() for name in (first, end))
    if top is None or bottom is None:
        raise ValueError(f"the report does not show {first} or {end}")
    above = max(0, top["y"] - 16)
    clip = {"x": 0, "y": above, "width": WIDTH, "height": bottom["y"] - above - 2}
    with Image.open(io.BytesIO(page.screenshot(clip=clip, full_page=True))) as picture:
        few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    written = io.BytesIO()
    few.save(written, "PNG", optimize=True)
    return written.getvalue()


def photograph(run: Path, folder: Path) -> None:
    """Write all pictures of a run's report."""
    programs = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    program = next(filter(None, programs), None) or sys.exit("no Chromium on the PATH")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        page = browser.new_page(
            viewport={"width": WIDTH, "height": 900}, device_scale_factor=SCALE, offline=True
        )
        page.goto((run / "report.html").resolve().as_uri())
        page.wait_for_selector("html[data-drawn=true]", timeout=120_000)
        for name, ends in PICTURES.items():
            data = take(page, *ends)
            assert len(data) < MOST_BYTES, f"{name} has {len(data)} bytes"
            (folder / name).write_bytes(data)
        browser.close()


def main(argv: list[str]) -> None:
    """Take the pictures, of a new quick start unless a run is named."""
    folder = Path(argv[1]) if len(argv) > 1 else FOLDER
    if argv:
        photograph(Path(argv[0]), folder)
        return
    with tempfile.TemporaryDirectory() as place:
        words = ["lightrft", "quickstart", "--output_dir", "quickstart"]
        subprocess.run(words, cwd=place, check=True)
        photograph(Path(place) / "quickstart", folder)


if __name__ == "__main__":
    main(sys.argv[1:])

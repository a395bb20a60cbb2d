"""A browser without a network, and what is wrong with the picture it shows."""

import shutil
from contextlib import contextmanager

import pytest
from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
sync_api = pytest.importorskip("playwright.sync_api", reason="package playwright is not installed")
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is here")


@contextmanager
def open_browser():
    """A browser without a window."""
    with sync_api.sync_playwright() as playwright:
        # The sandbox needs privileges that containers do not give.
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        opened = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        yield opened
        opened.close()


# `overlapping`: boxes of what is seen, of texts (also those of charts), pictures and charts, cut to
# the boxes of what scrolls around them, two of which overlap although neither is within the other
# in the document. `cut`: texts that leave a box which hides what is outside of it, or the page.
FAULTS = """(slack) => {
  const named = (node) => node.textContent.trim().slice(0, 40);
  const clipped = (node) => {
    let box = node.getBoundingClientRect();
    let [left, top, right, bottom] = [box.left, box.top, box.right, box.bottom];
    for (let up = node.parentElement; up; up = up.parentElement) {
      const flow = getComputedStyle(up);
      if (flow.overflowX === "visible" && flow.overflowY === "visible") continue;
      const outer = up.getBoundingClientRect();
      left = Math.max(left, outer.left); right = Math.min(right, outer.right);
      top = Math.max(top, outer.top); bottom = Math.min(bottom, outer.bottom);
    }
    return { node, left, top, right, bottom };
  };
  const texts = (node) => [...node.childNodes].filter((n) => n.nodeType === 3 && n.data.trim());
  const isSeen = (node) => node.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  const isCut = (node) => texts(node).some((text) => {
    const range = document.createRange();
    range.selectNodeContents(text);
    const box = range.getBoundingClientRect();
    let canScroll = { x: false, y: false };
    for (let up = node; up; up = up.parentElement) {
      const [flow, outer] = [getComputedStyle(up), up.getBoundingClientRect()];
      const hides = (value) => ["hidden", "clip"].includes(value);
      if (!canScroll.x && hides(flow.overflowX)
        && (box.left < outer.left - slack || box.right > outer.right + slack)) return true;
      if (!canScroll.y && hides(flow.overflowY)
        && (box.top < outer.top - slack || box.bottom > outer.bottom + slack)) return true;
      canScroll.x ||= ["auto", "scroll"].includes(flow.overflowX);
      canScroll.y ||= ["auto", "scroll"].includes(flow.overflowY);
    }
    return !canScroll.x
      && (box.left < -slack || box.right > document.documentElement.clientWidth + slack);
  });
  const seen = [...document.body.querySelectorAll("*")]
    .filter((node) => !["SCRIPT", "STYLE", "NOSCRIPT", "OPTION"].includes(node.tagName))
    .filter(isSeen);
  const all = seen
    // Inline parts of a text flow around each other by themselves; their block stands for them.
    .filter((node) => getComputedStyle(node).display !== "inline" || node instanceof SVGElement)
    .filter((node) => texts(node).length || ["IMG", "SELECT"].includes(node.tagName)
      || node.classList.contains("plot"))
    .map(clipped)
    .filter((box) => box.right - box.left > slack && box.bottom - box.top > slack)
    .sort((a, b) => a.top - b.top);
  const overlapping = [];
  for (let i = 0; i < all.length; i += 1) {
    for (let j = i + 1; j < all.length && all[j].top < all[i].bottom - slack; j += 1) {
      const [a, b] = [all[i], all[j]];
      if (a.node.contains(b.node) || b.node.contains(a.node)) continue;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > slack && high > slack) overlapping.push(`${named(a.node)} | ${named(b.node)}`);
    }
  }
  return { count: all.length, overlapping, cut: seen.filter(isCut).map(named) };
}"""
SLACK = 1.5


def faults(page):
    """What overlaps or is cut, and how many texts, pictures and charts were looked at."""
    found = page.evaluate(FAULTS, SLACK)
    return found["overlapping"] + [f"cut: {text}" for text in found["cut"]], found["count"]


def take_picture(page, path):
    """A picture of the whole page; gives its size in pixels and its number of colours."""
    page.screenshot(path=path, full_page=True)
    with Image.open(path) as picture:
        return picture.size, len(picture.convert("RGB").getcolors(1 << 24))

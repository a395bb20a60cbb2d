"""Environments that show pictures; run in worker processes by the tests."""

import io
from pathlib import Path

from PIL import Image


def squares(number, size=(56, 56)):
    """A pattern of each number's own."""
    pixels = [
        ((x * (number + 2)) % 256, (y * (number + 5)) % 256, (x * y + 40 * number) % 256)
        for y in range(size[1])
        for x in range(size[0])
    ]
    image = Image.new("RGB", size)
    image.putdata(pixels)
    return image


class Album:
    """`reset` shows a picture, and every page another one."""

    def reset(self, seed=0, shift=None, **row):
        self.row, self.pages = row, 0
        self.base = 10 * row["number"]
        if shift is not None and Path(shift).exists():
            self.base += 1
        return [{"type": "text", "text": " First:"}, {"type": "image", "image": squares(self.base)}]

    def turn(self):
        """Show the next page."""
        if "shows" in self.row:
            return [{"type": "image", "image": self.row["shows"]}]
        self.pages += 1
        shown = squares(self.base + self.pages, (84, 56) if self.pages % 2 else (56, 56))
        if self.pages % 2:
            shown = bytes_of(shown)
        return [
            {"type": "text", "text": f"page {self.pages} <image> "},
            {"type": "image", "image": shown},
            {"type": "text", "text": "."},
        ]

    def get_reward(self):
        return float(self.pages)


class Book(Album):
    """Shows words alone."""

    def reset(self, **row):
        super().reset(**row)
        return " First:"

    def turn(self):
        """Show the next page."""
        return "page"


def bytes_of(image):
    """As files hold it."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


class Walk:
    """Of SkyRL-Gym's make: answers every turn with a picture."""

    def __init__(self, env_config=None, extras=None):
        self.steps = 0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.steps += 1
        parts = [{"type": "image", "image": squares(self.steps)}, {"type": "text", "text": "on"}]
        return {
            "observations": [{"role": "user", "content": parts}],
            "reward": 0.5,
            "done": self.steps == 3,
        }

    def close(self):
        pass

"""The pictures of the pages, drawn as SVG: `python docs/draw.py` writes docs/pictures."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "pictures"
COLOURS = {
    "data": ("#fff4d6", "#b7791f"),
    "engine": ("#e3f0ff", "#2b6cb0"),
    "train": ("#e6f7ec", "#2f855a"),
    "check": ("#fde8ef", "#b83280"),
    "plain": ("#f3f4f6", "#4b5563"),
}


@dataclass
class Picture:
    """A drawing on a white card, readable on light and dark pages.

    Args:
        width: Pixels.
        height: Pixels.
        title: What the picture shows; read aloud where it cannot be seen.
    """

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, height: int, kind: str, *lines: str) -> None:
        """Draw a box of `COLOURS` whose first line is its name."""
        fill, edge = COLOURS[kind]
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" '
            f'fill="{fill}" stroke="{edge}" stroke-width="1.5"/>'
        )
        top = y + (height - 18 * (len(lines) - 1)) / 2 + 5
        for number, line in enumerate(lines):
            weight = "600" if number == 0 else "400"
            size = 14 if number == 0 else 12
            self.text(x + width / 2, top + 18 * number, line, size=size, weight=weight)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        weight: str = "400",
        anchor: str = "middle",
    ) -> None:
        """Write a line of text around, or from, a point."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" '
            f'text-anchor="{anchor}" fill="#1f2937">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[int, int], label: str = "", dashed: bool = False) -> None:
        """Draw an arrow through points, its label above the middle of the longest piece."""
        path = " L ".join(f"{x} {y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="M {path}" fill="none" stroke="#4b5563" stroke-width="1.5"{dash} '
            'marker-end="url(#head)"/>'
        )
        if label:
            pieces = itertools.pairwise(points)
            (x1, y1), (x2, y2) = max(pieces, key=lambda p: abs(p[0][0] - p[1][0]))
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 7, label)

    def svg(self) -> str:
        """Return the file's text."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#4b5563"/></marker>'
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" role="img" font-family="system-ui, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n<defs>{head}</defs>\n"
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="#ffffff"/>\n'
            f"{body}\n</svg>\n"
        )


def step() -> Picture:
    """Draw a step of reinforcement on one rank."""
    picture = Picture(860, 300, "A step: sample, score, exchange, train, send the weights back")
    picture.box(20, 40, 120, 64, "data", "Prompts", "rows of your file")
    picture.box(200, 40, 150, 64, "engine", "Rollout engine", "samples G answers", "to each prompt")
    picture.box(430, 40, 150, 64, "data", "Rewards", "your function, in", "a worker process")
    picture.box(670, 40, 160, 64, "plain", "Exchange", "all ranks know all rows")
    picture.box(670, 190, 160, 64, "train", "Forward passes", "logprobs, advantages")
    picture.box(430, 190, 150, 64, "train", "Update", "policy loss, AdamW")
    picture.box(200, 190, 150, 64, "check", "Weight sync", "send, hash, compare")
    picture.box(20, 190, 120, 64, "plain", "Files", "metrics, samples,", "checkpoints")
    picture.arrow((140, 72), (198, 72))
    picture.arrow((350, 72), (428, 72), label="answers")
    picture.arrow((580, 72), (668, 72), label="scores")
    picture.arrow((750, 104), (750, 188))
    picture.arrow((670, 222), (582, 222), label="batches")
    picture.arrow((430, 222), (352, 222), label="weights")
    picture.arrow((275, 190), (275, 106))
    picture.text(335, 150, "proved equal", size=12)
    picture.arrow((200, 222), (142, 222))
    picture.text(430, 285, "Every rank does all of this; ranks share prompts and gradients.")
    return picture


def order() -> Picture:
    """Draw who decides what is drawn, and what comes back."""
    picture = Picture(860, 210, "A sampler draws places, and sees their results after the step")
    picture.box(20, 50, 140, 64, "data", "Rows", "columns, weights,", "pass rates")
    picture.box(240, 50, 150, 64, "plain", "Sampler", "draw(n) -> places")
    picture.box(470, 50, 150, 64, "engine", "Step", "sample, score, train")
    picture.box(700, 50, 140, 64, "check", "Audit", "places once more")
    picture.box(240, 145, 150, 50, "train", "Checkpoint", "state")
    picture.arrow((160, 82), (238, 82))
    picture.arrow((390, 72), (468, 72), label="places")
    picture.arrow((620, 82), (698, 82), label="record")
    picture.arrow((545, 116), (545, 132), (360, 132), (360, 116), dashed=True)
    picture.text(455, 150, "observe(results), in the order of steps", size=12, anchor="start")
    picture.arrow((300, 116), (300, 143))
    return picture


def weight_sync() -> Picture:
    """Draw the way of a weight and where the five checks stand."""
    picture = Picture(860, 250, "Weight sync and its checks")
    picture.box(20, 90, 150, 70, "train", "Trainer", "sharded weights", "float32 or bfloat16")
    picture.box(250, 90, 150, 70, "plain", "Bucket", "cast and packed,", "one collective")
    picture.box(480, 90, 150, 70, "engine", "Engine", "its own layout", "and dtype")
    picture.box(700, 90, 140, 70, "data", "Next rollout", "weights_version + 1")
    picture.arrow((170, 125), (248, 125), label="shards")
    picture.arrow((400, 125), (478, 125), label="ranges")
    picture.arrow((630, 125), (698, 125))
    for x, name, what in (
        (95, "1 accounting", "every name, every shape"),
        (325, "2 finite", "no inf, no NaN"),
        (555, "4 caches", "nothing of older weights"),
    ):
        picture.text(x, 50, name, size=13, weight="600")
        picture.text(x, 68, what)
    picture.arrow((95, 162), (95, 205), (555, 205), (555, 164), dashed=True)
    picture.text(325, 198, "3 hash: trainer's shards against the engine's storage", size=13)
    picture.text(325, 232, "5 canary: both score one prompt", size=13)
    return picture


def stages() -> Picture:
    """Draw the stages and what each starts from."""
    picture = Picture(860, 290, "Stages of training and the models they give")
    picture.box(20, 100, 130, 64, "plain", "Base model", "any causal LM")
    picture.box(220, 100, 150, 64, "train", "lightrft sft", "answers to imitate")
    picture.box(450, 20, 170, 64, "train", "lightrft prefer", "pairs: DPO and others")
    picture.box(450, 100, 170, 64, "train", "lightrft reward", "pairs, scores, steps")
    picture.box(450, 180, 170, 64, "train", "lightrft distill", "a teacher")
    picture.box(690, 100, 150, 64, "engine", "lightrft train", "GRPO, PPO and others")
    picture.arrow((150, 132), (218, 132))
    picture.arrow((370, 122), (410, 122), (410, 52), (448, 52))
    picture.arrow((370, 132), (448, 132))
    picture.arrow((370, 142), (410, 142), (410, 212), (448, 212))
    picture.arrow((620, 132), (688, 132), label="scores")
    picture.arrow((295, 164), (295, 274), (765, 274), (765, 166), label="policy to start from")
    return picture


def episode() -> Picture:
    """Draw the turns of an episode with one tool call."""
    picture = Picture(860, 200, "An episode: turns of the model, answers of tools, one reward")
    lane = (
        ("data", "Prompt", "task"),
        ("engine", "Turn 1", "a tool call"),
        ("data", "Answer", "of the tool"),
        ("engine", "Turn 2", "final text"),
        ("check", "Reward", "of the episode"),
    )
    for number, (kind, name, what) in enumerate(lane):
        x = 20 + 170 * number
        picture.box(x, 50, 130, 60, kind, name, what)
        if number:
            picture.arrow((x - 40, 80), (x - 2, 80))
    picture.text(255, 140, "trained", weight="600")
    picture.text(425, 140, "shown, not trained", weight="600")
    picture.text(595, 140, "trained", weight="600")
    picture.text(
        430, 180, "Ids are never decoded and encoded again; a turn's ids stay what was sampled."
    )
    return picture


def overlap() -> Picture:
    """Draw when ranks sample and train: in turn, with lag, on ranks of their own."""
    picture = Picture(860, 290, "Ways to overlap sampling and training")
    rows = (
        (
            "off",
            "all ranks",
            [
                ("engine", 0, 2, "sample 1"),
                ("train", 2, 1, "train 1"),
                ("engine", 3, 2, "sample 2"),
                ("train", 5, 1, "train 2"),
            ],
        ),
        (
            "stream",
            "all ranks",
            [
                ("engine", 0, 1.4, "sample 1"),
                ("train", 1.4, 1, "train 1"),
                ("engine", 2.4, 1.4, "sample 2"),
                ("train", 3.8, 1, "train 2"),
            ],
        ),
        (
            "split",
            "ranks that generate",
            [
                ("engine", 0, 2, "sample 1"),
                ("engine", 2, 2, "sample 2"),
                ("engine", 4, 2, "sample 3"),
            ],
        ),
        ("", "ranks that train", [("train", 2, 1, "train 1"), ("train", 4, 1, "train 2")]),
    )
    for number, (name, who, spans) in enumerate(rows):
        y = 20 + 60 * number
        picture.text(20, y + 20, name, size=14, weight="600", anchor="start")
        picture.text(20, y + 38, who, anchor="start")
        for kind, start, length, label in spans:
            picture.box(int(170 + start * 110), y, int(length * 110) - 4, 42, kind, label)
    picture.text(
        430, 275, "stream: long answers go on in the next step, so no rank waits for the last one"
    )
    return picture


PICTURES = {
    "step.svg": step,
    "order.svg": order,
    "weight_sync.svg": weight_sync,
    "stages.svg": stages,
    "episode.svg": episode,
    "overlap.svg": overlap,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, draw in PICTURES.items():
        (FOLDER / file_name).write_text(draw().svg(), encoding="utf-8")

"""Two-digit sums for a small pretrained model: the data, and the reward of a run.

    python examples/smollm2/sums.py DIRECTORY

writes DIRECTORY/train.jsonl and DIRECTORY/eval.jsonl, which share no sum.
"""

import itertools
import json
import random
import sys
from pathlib import Path

NUM_HELD_OUT = 256


def first_line(responses: list[str], labels: list[str]) -> list[float]:
    """1 where the first line of the response is the sum."""
    lines = (response.strip(" ").split("\n", 1)[0] for response in responses)
    return [float(line.strip() == label) for line, label in zip(lines, labels, strict=True)]


def write(folder: Path) -> None:
    """All sums of two numbers from 10 to 99, in an order that is always the same."""
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(0).shuffle(pairs)
    rows = [json.dumps({"input": f"{a} + {b}", "label": str(a + b)}) for a, b in pairs]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval.jsonl").write_text("\n".join(rows[:NUM_HELD_OUT]) + "\n")
    (folder / "train.jsonl").write_text("\n".join(rows[NUM_HELD_OUT:]) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

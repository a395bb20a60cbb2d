"""Sums of reasoning-gym for all stages of training: demonstrations, prompts, held-out prompts.

    python examples/smollm2/stages.py DIRECTORY

writes DIRECTORY/demonstrations.jsonl, DIRECTORY/train.jsonl and DIRECTORY/eval.jsonl, no two of
which share a question.
"""

import json
import sys
from pathlib import Path

from lightrft.tools.rewards.gym_data import gym_rows

NUM_HELD_OUT, NUM_DEMONSTRATIONS = 256, 384
TASK = (
    "reasoning_gym:basic_arithmetic?min_terms=2&max_terms=2&min_digits=2&max_digits=2"
    '&operators=["%2B"]&allow_parentheses=false&allow_negation=false&size=6000'
)


def write(folder: Path) -> None:
    """Different questions of one sequence, in its order."""
    rows = list({row["input"]: row for row in gym_rows(TASK, "train")}.values())
    rows = [{**row, "input": f"{row['input']} ="} for row in rows]
    held_out, taught = rows[:NUM_HELD_OUT], rows[NUM_HELD_OUT:][:NUM_DEMONSTRATIONS]
    demonstrations = [{"prompt": row["input"], "completion": f" {row['label']}"} for row in taught]
    files = {
        "eval": held_out,
        "demonstrations": demonstrations,
        "train": rows[NUM_HELD_OUT + NUM_DEMONSTRATIONS :],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, written in files.items():
        text = "".join(json.dumps(row) + "\n" for row in written)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

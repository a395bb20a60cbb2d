"""The stages that train on given rows: a new one is a row of this table, and tests go over it."""

from tests.runs import row_options, write

from lightrft.config import TrainConfig
from lightrft.trainer import DistillationTrainer, PreferenceTrainer, RewardTrainer, SFTTrainer

TRAINERS = {
    "sft": SFTTrainer,
    "prefer": PreferenceTrainer,
    "reward": RewardTrainer,
    "distill": DistillationTrainer,
}


def write_rows(folder, name="rows", *, start=0, count=8, swapped=False):
    """Write rows that every stage reads as its own; return their path.

    Args:
        folder: Gets the file.
        name: Name of the file, without its suffix.
        start: Number of the first prompt.
        count: Number of rows.
        swapped: Take the worse answer, which a word tells apart, for the better one.
    """
    answers = ("rejected", "chosen") if swapped else ("chosen", "rejected")
    rows = []
    for n in range(start, start + count):
        pair = dict(zip(answers, (f"yes {n * 7 % 10}", f"no {n * 3 % 10}"), strict=True))
        rows.append({"prompt": f"name {n}: ", "completion": pair["chosen"], **pair})
    return write(folder / f"{name}.jsonl", rows)


def options(stage, models, rows, folder, **changes):
    """Return options of a run of a stage: six steps of four rows."""
    teacher = {"teacher": str(models / "teacher"), "teacher_form": "forward"}
    settings = {"actor_learning_rate": 1e-3, **(teacher if stage == "distill" else {}), **changes}
    return row_options(models / "student", rows, folder, **settings)


def run(stage, models, rows, folder, **changes):
    """Carry out a run of a stage; return its summary."""
    return TRAINERS[stage](TrainConfig(**options(stage, models, rows, folder, **changes))).train()

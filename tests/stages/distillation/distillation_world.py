"""Whole runs of distillation on rows, or on samples of prompts, for tests."""

from tests.runs import write

from lightrft.config import TrainConfig
from lightrft.trainer import DistillationTrainer

# Sizes of a step on samples.
SAMPLED = {"rollout_batch_size": 8, "n_samples_per_prompt": 2, "train_batch_size": 16}
SAMPLED |= {"generate_max_len": 5, "max_steps": 1}


def write_rows(folder, **columns):
    """Write eight rows, which are prompts, too; return their path.

    Args:
        folder: Gets the file.
        **columns: Further columns, each with a value of every row.
    """
    rows = []
    for place, letter in enumerate("aeiou123"):
        row = {name: values[place] for name, values in columns.items()}
        texts = {"prompt": f"say {letter}", "completion": letter * (1 + 9 * (place % 2))}
        rows.append({"input": f"say {letter}", **texts, **row})
    return write(folder / "rows.jsonl", rows)


def options(models, folder, name="run", **changes):
    """Return options of a run on the rows of a folder, which gets it."""
    settings = {
        "pretrain": str(models / "student"),
        "teacher": str(models / "teacher"),
        "prompt_data": str(folder / "rows.jsonl"),
        "output_dir": str(folder / name),
        "train_batch_size": 8,
        "micro_train_batch_size": 4,
        "actor_learning_rate": 2e-3,
        "lr_warmup_ratio": 0.0,
        "num_threads": 1,
        "fsdp": True,
        **changes,
    }
    if "teachers" in changes:
        del settings["teacher"]
    return settings


def run(models, folder, name="run", **changes):
    """Carry out a run; return its summary."""
    return DistillationTrainer(TrainConfig(**options(models, folder, name, **changes))).train()

"""Whole runs of the stages, for tests: what they leave, and how one is interrupted."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from unittest.mock import patch

from lightrft.config import TrainConfig
from lightrft.run.loop import Loop
from lightrft.tools.model_presets import write_tiny_model


class Interrupted(Exception):
    """The test ends a run here, in the middle of a step."""


def tiny_models(folder, *names):
    """The folder with a tiny model of each name, with random weights of its own."""
    for seed, name in enumerate(names, start=1):
        write_tiny_model(folder / name, "tiny-qwen3", seed=seed)
    return folder


def write(path, rows):
    """Path of the rows as a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def options(model, rows, folder, **changes):
    """Options of a run of three passes in steps of four rows."""
    return {
        "pretrain": model,
        "prompt_data": rows,
        "output_dir": str(folder),
        "train_batch_size": 4,
        "micro_train_batch_size": 2,
        "max_epochs": 3,
        "num_threads": 1,
        **changes,
    }


def steps(folder):
    """Metrics of every step without what a clock says."""
    ignored = ("second", "memory/", "mfu", "tflops")
    return [
        {n: v for n, v in json.loads(line).items() if not any(word in n for word in ignored)}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def digest(folder):
    """Hash of the trained weights."""
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def interrupted(trainer, config, step):
    """Ends a run in the update of a step; what it has written stays."""
    original = Loop.update

    def update(self, batch, under_way):
        if under_way.number == step:
            raise Interrupted
        return original(self, batch, under_way)

    with patch.object(Loop, "update", update):
        try:
            trainer(config).train()
        except Interrupted:
            return
    raise AssertionError(f"the run ended before step {step}")


def continued(trainer, folder, settings, step):
    """The summary of a run that ended in a step and went on, to the bit as a whole one.

    Args:
        trainer: Class of the stage.
        folder: Gets both runs.
        settings: Function of the folder of a run.
        step: In which one ends.
    """
    whole, parts = (TrainConfig(**settings(folder / name)) for name in ("whole", "parts"))
    trainer(whole).train()
    interrupted(trainer, parts, step)
    summary = trainer(parts).train()
    assert steps(folder / "parts") == steps(folder / "whole")
    assert digest(folder / "parts") == digest(folder / "whole")
    return summary


def in_ranks(rank, world_size, name, runs, interrupted_at=None):
    """The summary of each run on this rank; one that is interrupted is continued."""
    import lightrft.trainer
    from lightrft.strategy.distributed.process_groups import start_process_group

    # Kept over all runs: to end one and start the next at one address is a race.
    start_process_group(None)
    trainer, found = getattr(lightrft.trainer, name), []
    for settings in runs:
        config = TrainConfig(**settings)
        if interrupted_at is not None:
            interrupted(trainer, config, interrupted_at)
        found.append(asdict(trainer(config).train()))
    return found

"""Trains a tiny model for many steps and says what grows: memory, descriptors, threads, files.

    python scripts/soak.py FOLDER --engine hf --steps 1000

Writes `soak.jsonl` (one line a step) and prints, as JSON, the slope of each quantity over the
second half of the steps, in units per step. Temporary files are those in TMPDIR. Memory is what is
held: free pages of the C library's heaps are handed back before it is measured, since one megabyte
by which a heap grows around a long-lived block would look like 15 KiB in each of 100 steps; and
pages of files, which the kernel drops when other programs need memory, are left out.
`--leak KIB` plants a leak, which has to be found.
"""

import argparse
import ctypes
import gc
import json
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

QUANTITIES = ("memory_kib", "descriptors", "threads", "temporary_files")


def slope(values: Sequence[float]) -> float:
    """Least-squares slope of equally spaced values, per step; 0 of fewer than two."""
    count = len(values)
    if count < 2:
        return 0.0
    middle, mean = (count - 1) / 2, sum(values) / count
    above = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return above / sum((i - middle) ** 2 for i in range(count))


def slopes(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Slope of each quantity over the second half of the rows, when all caches are filled."""
    late = rows[len(rows) // 2 :]
    return {name: slope([row[name] for row in late]) for name in QUANTITIES}


def hand_back() -> None:
    """Frees garbage and returns the free pages of all heaps (glibc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def held_kib(pid: int) -> float:
    """Resident memory of a process that is no page of a file, which the kernel may drop at will."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def measure() -> dict[str, float]:
    """What this process and its children hold."""
    import psutil

    hand_back()
    process = psutil.Process()
    family = [process, *process.children(recursive=True)]
    temporary = Path(tempfile.gettempdir())
    return {
        "memory_kib": sum(held_kib(member.pid) for member in family),
        "descriptors": float(sum(member.num_fds() for member in family)),
        "threads": float(threading.active_count()),
        "temporary_files": float(sum(1 for _ in temporary.rglob("*"))),
    }


class Meter:
    """A logger of a run that measures after every step.

    Args:
        path: Gets one line a step.
        leak_kib: Memory to hold from each step on.
    """

    def __init__(self, path: Path, leak_kib: int = 0) -> None:
        self.rows: list[dict[str, float]] = []
        self._path = path
        self._leak_kib = leak_kib
        self._leaked: list[bytearray] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Measures a step."""
        del metrics
        self._leaked += [bytearray(b"x" * 1024) for _ in range(self._leak_kib)]
        self.rows.append({"step": float(step), **measure()})
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(self.rows[-1]) + "\n")

    def close(self) -> None:
        """Has nothing pending."""


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", default="hf", choices=("hf", "vllm"))
    parser.add_argument("--steps", default=1000, type=int)
    parser.add_argument("--leak", default=0, type=int, metavar="KIB", help="Of every step.")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Torch keeps the last 2,000 collectives, 1.5 MB: this table is filled by 90 steps, and a
    # shorter one by the first few.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "100")

    from lightrft.config import TrainConfig
    from lightrft.run.assembly import run_training
    from lightrft.tools.model_presets import write_tiny_model

    write_tiny_model(folder / "tiny", "tiny-qwen3", seed=0)
    rows = [json.dumps({"input": f"Say {number}.", "label": str(number)}) for number in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "reward.py").write_text(
        "def digits(responses):\n"
        "    return [sum(c.isdigit() for c in r) / max(1, len(r)) for r in responses]\n"
    )
    meter = Meter(folder / "soak.jsonl", options.leak)
    steps = options.steps
    config = TrainConfig(
        pretrain=str(folder / "tiny"),
        prompt_data=str(folder / "prompts.jsonl"),
        reward_fn=(f"{folder / 'reward.py'}:digits",),
        output_dir=str(folder / "run"),
        fsdp=True,
        bf16=False,
        engine_type=options.engine,
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        train_batch_size=8,
        micro_train_batch_size=4,
        prompt_max_len=16,
        generate_max_len=8,
        max_len=None if options.engine == "hf" else 64,
        num_episodes=steps,
        max_steps=steps,
        save_steps=max(1, steps // 10),
        actor_learning_rate=1e-4,
        eval_data=str(folder / "prompts.jsonl"),
        eval_steps=max(1, steps // 10),
    )
    run_training(config, loggers=[meter])
    done = [row for row in meter.rows if row["step"] > 0]
    print(json.dumps({"steps": len(done), **slopes(done)}))


if __name__ == "__main__":
    main()

"""Whether a task is learnt as well here as with TRL, from one script of TRL and its translation.

    OMP_NUM_THREADS=1 uv run --group peers python benchmarks/learning_parity.py FOLDER

Makes the quick start's imitator of sums and its rows, runs `trl_sums.py` as it is, and what
`lightrft config translate` makes of it, with each seed, and scores greedy answers to the held-out
sums. Both see the same rows in an order of their own, so that curves agree within the spread of
seeds and not step by step. The numbers are in `learning_parity.json` of the folder; `results/` has
those of five seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

SCRIPT = Path(__file__).parent / "trl_sums.py"
RESULT = "learning_parity.json"
TEMPLATE = "<|user|>{}<|assistant|>"


def run(folder: Path, *command: str) -> None:
    """Runs a command in the folder; its output goes to `log.txt` there."""
    print(" ".join(command), flush=True)
    with (folder / "log.txt").open("a") as log:
        subprocess.run(command, cwd=folder, stdout=log, stderr=log, check=True)


def lightrft(folder: Path, *arguments: str) -> None:
    run(folder, sys.executable, "-m", "lightrft.cli.main", *arguments)


def prepare(folder: Path) -> None:
    """The imitator, rows with rendered prompts, TRL's script and its translation."""
    lightrft(folder, "quickstart", "--output_dir", "start")
    shutil.copytree(folder / "start/warm_start", folder / "warm_start")
    with (folder / "sums.jsonl").open("w") as file:
        for line in (folder / "start/data/train.jsonl").read_text().splitlines():
            row = json.loads(line)
            file.write(json.dumps(row | {"prompt": TEMPLATE.format(row["prompt"])}) + "\n")
    (folder / "sums.py").write_text(SCRIPT.read_text())
    lightrft(folder, "config", "translate", "sums.py", "translated")


def held_out(folder: Path, model: str) -> float:
    """The share of right greedy answers to 512 held-out sums."""
    scored = f"{model.replace('/', '_')}_scored"
    lightrft(folder, "eval", model, "--config", "start/config.toml", "--output_dir", scored)
    return json.loads((folder / scored / "eval.json").read_text())["metrics"]["greedy/reward"]


def train_trl(folder: Path, seed: int) -> list[float]:
    """The mean reward of each step."""
    text, name = SCRIPT.read_text(), f"trl_{seed}"
    text = text.replace("seed=0", f"seed={seed}").replace('"trl"', f'"{name}"')
    (folder / f"{name}.py").write_text(text)
    run(folder, sys.executable, f"{name}.py")
    history = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    return [float(step["reward"]) for step in history if "reward" in step]


def train_ours(folder: Path, seed: int) -> list[float]:
    """The mean reward of each step."""
    arguments = ["--fsdp", "--seed", str(seed), "--output_dir", f"ours_{seed}"]
    lightrft(folder, "train", "--config", "translated/run.toml", *arguments)
    lines = (folder / f"ours_{seed}/metrics.jsonl").read_text().splitlines()
    return [step["reward"] for step in map(json.loads, lines) if "reward" in step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="A new one.")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True)
    prepare(folder)
    sides = {"trl": ([], []), "lightrft": ([], [])}
    for seed in range(options.seeds):
        for side, train, model in (
            ("trl", train_trl, f"trl_{seed}"),
            ("lightrft", train_ours, f"ours_{seed}/model"),
        ):
            curves, scores = sides[side]
            curves.append(train(folder, seed))
            scores.append(held_out(folder, model))
            print(f"{side} seed {seed}: held-out {scores[-1]:.3f}", flush=True)
    record = {
        "start": held_out(folder, "warm_start"),
        **{
            side: {
                "held_out": scores,
                "mean": statistics.mean(scores),
                "reward": [statistics.mean(step) for step in zip(*curves, strict=True)],
                "reward_low": [min(step) for step in zip(*curves, strict=True)],
                "reward_high": [max(step) for step in zip(*curves, strict=True)],
            }
            for side, (curves, scores) in sides.items()
        },
        "machine": f"{platform.machine()}, 1 thread",
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
    }
    text = json.dumps(record, indent=1)
    (folder / RESULT).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

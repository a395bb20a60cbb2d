"""The steps of the table, each in a process of its own under its limit, the headline first.

    python3 benchmarks/gpu/steps.py --out FOLDER --scratch FOLDER [--call second] [--seconds N]
        [--rehearse] [STEP ...]

`run_all.sh` prepares the machine and calls this. The folder then holds three files: `table.jsonl`
(a line for each number, written when it is known), `table.md` (the table of it) and `raw.tgz` (all
that the steps printed). They are renewed after every step.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import lines
import report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Of one call, with its preparation: unpacking, the extension, the models.
SECONDS = {"first": 560, "second": 210, "others": 120}
PREPARE_SECONDS = {"first": 65, "second": 5, "others": 0}
REHEARSAL_SECONDS = 1500
LEAST_SECONDS = 15
RAW_BYTES = 2_000_000


@dataclass(frozen=True, slots=True)
class Try:
    """A way to run a step again after it has failed without a number.

    Args:
        arguments: Further arguments of the step.
        culprit: What is to blame for the failure before where this one succeeds.
    """

    arguments: tuple[str, ...]
    culprit: str


@dataclass(frozen=True, slots=True)
class Step:
    """A part of the table.

    Args:
        name: Name on the command line.
        limit: Seconds, of all its commands together.
        commands: Arguments of python3, run one after another.
        tries: Further ways to run the first command.
    """

    name: str
    limit: int
    commands: tuple[tuple[str, ...], ...]
    tries: tuple[Try, ...] = ()


EAGER = ("--engine_args", "enforce_eager=true")
TRIES = (
    Try(EAGER, "CUDA graphs or torch.compile of vLLM: it runs with enforce_eager=true"),
    Try(
        (*EAGER, "attention_backend=TRITON_ATTN"),
        "FlashAttention of vLLM: it runs with attention_backend=TRITON_ATTN",
    ),
)
NO_CULPRIT = "vLLM's own binaries (rewritten cubins), the driver or the adapter: no way runs"


def grpo(name: str, limit: int, *more: str) -> Step:
    """A step of reinforcement with vLLM; `more` are arguments of grpo.py."""
    return Step(f"grpo_{name}", limit, (("grpo.py", name, *more),), TRIES)


def rows(name: str, limit: int, shape: str, *more: str) -> Step:
    """A baseline's shape, by lightrft and then by TRL; `more` are arguments of rows.py."""
    kinds = ("ours", "trl")
    return Step(f"rows_{name}", limit, tuple(("rows.py", k, name, shape, *more) for k in kinds))


LORA = ("--lora_rank", "16")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=30")
TESTS = ("tests/kernels", "tests/models/test_packed_gpu.py", "tests/engines/test_hf_engine.py")
CALLS = {
    "first": (
        grpo("0.5b", 125, "--steps", "4"),
        grpo("0.5b_stream", 65, "--steps", "4", "--stream"),
        rows("0.6b_16k", 50, "qwen3-0.6b", "--tokens", "16384", "--steps", "4"),
        Step("head_7b", 40, (("kernels.py", "head"),)),
        grpo("1.5b", 110, "--steps", "3"),
        Step("buckets", 20, (("kernels.py", "buckets"),)),
        rows(
            "4b_lora_16k", 55, "qwen3-4b", "--lora_rank", "16", "--tokens", "16384", "--steps", "3"
        ),
        Step("tests", 30, ((*PYTEST, *TESTS, "-m", "gpu"),)),
    ),
    "second": (
        grpo("1.5b_stream", 60, "--steps", "3", "--stream"),
        rows("0.6b_65k", 65, "qwen3-0.6b", "--tokens", "65536", "--steps", "2"),
        rows(
            "4b_lora_65k", 80, "qwen3-4b", "--lora_rank", "16", "--tokens", "65536", "--steps", "2"
        ),
    ),
    # By name alone.
    "others": (Step("doctor", 120, (("-m", "lightrft.cli.main", "doctor", "--gpu"),)),),
}


class Runner:
    """Runs steps, keeps what they have written, and renews the files of the folder.

    Args:
        folder: For the results.
        seconds: For all steps together, counted from now.
        scratch: For what steps print and write beside.
    """

    def __init__(self, folder: Path, seconds: float, scratch: Path) -> None:
        self.folder, self.scratch, self.raw = folder, scratch, scratch / "raw"
        self.end = time.monotonic() + seconds
        self.raw.mkdir(parents=True, exist_ok=True)
        os.environ[lines.PATH] = str(folder / "table.jsonl")

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def run(self, steps: tuple[Step, ...]) -> bool:
        """Run the steps in their order, and return whether all ended well."""
        is_good = True
        for place, step in enumerate(steps):
            # What earlier steps left of their time is this one's.
            spare = max(0.0, self.left - sum(each.limit for each in steps[place:]))
            limit = min(step.limit + spare, self.left)
            if limit < LEAST_SECONDS:
                lines.add("step", step.name, outcome="left out", seconds=0)
                continue
            print(f"=== {step.name}: at most {limit:.0f} s, {self.left:.0f} s are left", flush=True)
            begin = time.monotonic()
            outcome = self.step(step, begin + limit)
            lines.add("step", step.name, outcome=outcome, seconds=time.monotonic() - begin)
            # What is wrong with a machine explains its numbers; they are numbers all the same.
            is_good &= outcome == "done" or step.name == "doctor"
            self.keep()
        return is_good

    def step(self, step: Step, end: float) -> str:
        """Run the commands of a step, with its further tries; return how it ended."""
        outcomes = []
        for command in step.commands:
            kept = self.scratch / "engine_args"
            known = tuple(kept.read_text().split("\n")) if step.tries and kept.exists() else ()
            outcome = self.command(step.name, (*command, *known), end)
            # A wrong command (2) is wrong in every way.
            is_fault = outcome.startswith("exit code") and outcome != "exit code 2"
            for number, each in enumerate(step.tries if is_fault else ()):
                if known or self.has_numbers(step.name) or end - time.monotonic() < LEAST_SECONDS:
                    break
                outcome = self.command(step.name, (*command, *each.arguments), end)
                if outcome == "done":
                    lines.add("culprit", step.name, text=each.culprit)
                    kept.write_text("\n".join(each.arguments))
                    break
                if number + 1 == len(step.tries):
                    lines.add("culprit", step.name, text=NO_CULPRIT)
            outcomes.append(outcome)
        return next((each for each in outcomes if each != "done"), "done")

    def has_numbers(self, name: str) -> bool:
        """Return whether a step has written the numbers of a step of training by now."""
        kept = lines.read(self.folder / "table.jsonl")
        return any(
            f"{line['part']}_{line['name']}" == name and "step_seconds" in line for line in kept
        )

    def command(self, name: str, arguments: tuple[str, ...], end: float) -> str:
        """Run one command until it ends or its time does; return how it ended."""
        limit = end - time.monotonic()
        if limit < 1:
            return "left out"
        script = (str(HERE / arguments[0]),) if arguments[0].endswith(".py") else arguments[:1]
        number = len(list(self.raw.glob(f"{name}*.txt")))
        log = self.raw / f"{name}.{number}.txt"
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, *script, *arguments[1:]],
                cwd=ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LIGHTRFT_SCRATCH": str(self.scratch)},
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return "limit"
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if code != 0:
            print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), flush=True)
        return "done" if code == 0 else f"exit code {code}"

    def keep(self) -> None:
        """Renew the table and the archive of what was printed."""
        table = self.folder / "table.md"
        whole = table.with_suffix(".part")
        whole.write_text(report.table_of(lines.read(self.folder / "table.jsonl")))
        whole.replace(table)
        whole = self.folder / "raw.part"
        with tarfile.open(whole, "w:gz") as archive:
            for file in sorted(self.raw.iterdir()):
                if file.stat().st_size > RAW_BYTES:
                    file.write_bytes(file.read_bytes()[-RAW_BYTES:])
                archive.add(file, f"raw/{file.name}")
        whole.replace(self.folder / "raw.tgz")


def main() -> int:
    """Run the steps that are named, or those of a call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--call", choices=CALLS, default="first")
    parser.add_argument("--seconds", type=float, help="for all steps together")
    parser.add_argument("--spent", type=float, default=0, help="seconds that are gone of these")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("steps", nargs="*", metavar="STEP")
    options = parser.parse_args()
    known = {step.name: step for steps in CALLS.values() for step in steps}
    unknown = [name for name in options.steps if name not in known]
    if unknown:
        parser.error(f"unknown step {unknown[0]}: expected some of {' '.join(known)}")
    seconds = (options.seconds or SECONDS[options.call]) - options.spent
    steps = tuple(known[name] for name in options.steps) or CALLS[options.call]
    if options.rehearse:
        os.environ[lines.REHEARSAL] = "1"
        seconds = options.seconds or REHEARSAL_SECONDS
        chosen = steps if options.steps else tuple(known.values())
        # A busy CPU says nothing about limits of a GPU.
        steps = tuple(replace(step, limit=int(seconds)) for step in chosen)
    options.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(options.out, seconds, options.scratch)
    lines.add("machine", "versions", **report.versions(), is_rehearsal=options.rehearse)
    is_good = runner.run(steps)
    runner.keep()
    print((options.out / "table.md").read_text())
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

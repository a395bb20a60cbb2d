"""Which test finds which planted fault, and what each test costs.

    uv run --group mutation python scripts/kill_table.py reach     lines and seconds of each test
    uv run --group mutation python scripts/kill_table.py kill      plants faults, one at a time
    uv run --group mutation python scripts/kill_table.py table     benchmarks/results/kills.json

Two cores need about two hours for each of the first two. Both work in a clone of the last commit
under `build/kills`, and keep there what they know: `kill` goes on where it was stopped.

A fault is one of mutmut's mutations, drawn with a seed from the packages. Of the tests that run its
line, the quick ones are tried first, cheapest first, then the others: the first that fails kills
it. That test must pass without the fault, and is left out from then on if it does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock

from audit_mutants import Mutant, mutants_of
from coverage import CoverageData

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
RESULTS = ROOT / "benchmarks" / "results" / "kills.json"
AREAS = {
    **{
        name: f"packages/trainer/src/lightrft/{name}"
        for name in ("algorithms", "records", "rollout", "datasets", "stages")
    },
    **{name: f"packages/{name}/src/lightrft/{name}" for name in ("strategy", "engines", "kernels")},
}
FIRST_SECONDS = 5.0  # of tests that are tried together; each further try has twice as many
MOST_SECONDS = 900.0  # of tests that are tried on one fault
QUICK, FULL = "quick", "full"


@dataclass(frozen=True)
class TestCost:
    """Seconds of a test that passed, and its tier."""

    seconds: float
    tier: str


@dataclass(frozen=True)
class Reach:
    """What a run of the tests showed.

    Attributes:
        costs: Each test that passed.
        tests_of: Returns the names of the tests that run each line of a file.
    """

    costs: Mapping[str, TestCost]
    tests_of: Callable[[str], Mapping[int, frozenset[str]]]

    def candidates(self, path: str, lines: frozenset[int]) -> list[str]:
        """Return the tests that run one of the lines, quick ones first, cheapest first.

        Args:
            path: The file, from the root of the repository.
            lines: Lines of a statement; none stands for what runs when the module is imported,
                which every test of the file may notice.
        """
        by_line = self.tests_of(path)
        names = set().union(*(by_line.get(line, ()) for line in lines or by_line))
        names &= set(self.costs)
        return sorted(names, key=lambda n: (self.costs[n].tier != QUICK, self.costs[n].seconds, n))


@dataclass(frozen=True)
class Verdict:
    """What came of a fault: "killed", "survived", "not reached" or "undecided"."""

    area: str
    file: str
    line: int
    what: str
    outcome: str
    killer: str | None = None
    tier: str | None = None
    tests_tried: int = 0
    seconds: float = 0.0


@dataclass
class Checkout:
    """A clone in which faults are planted, with the Python that runs its tests."""

    folder: Path
    python: Path
    state: Path
    flaky: set[str] = field(default_factory=set)
    sound: set[str] = field(default_factory=set)

    def run_tests(self, names: Sequence[str], *, limit: float) -> str | None:
        """Run tests in this order; return the first that fails, None if all pass."""
        costs = self.state / f"{self.folder.name}-costs.jsonl"
        costs.unlink(missing_ok=True)
        listed = self.state / f"{self.folder.name}-tests.txt"
        listed.write_text("\n".join(names))
        environment = {**test_environment(self.folder), "LIGHTRFT_COSTS": str(costs)}
        command = [str(self.python), "-m", "pytest", *PLUGINS, "-x", "-q", "-m", "", f"@{listed}"]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = -1
                os.killpg(process.pid, 9)
        if code == 0:
            return None
        reports = read_lines(costs)
        failed = [report["test"] for report in reports if report["outcome"] == "failed"]
        # Nothing failed: it hangs, or what the tests import cannot be imported.
        left = [name for name in names if name not in {r["test"] for r in reports}]
        return (failed or left or list(names))[0]

    def try_fault(self, mutant: Mutant, area: str, reach: Reach) -> Verdict:
        """Plant a fault and try tests on it until one fails."""
        file = str(mutant.path)
        names = reach.candidates(file, mutant.lines)
        verdict = Verdict(area, file, mutant.line, mutant.what, "survived")
        if not names:
            return Verdict(**{**asdict(verdict), "outcome": "not reached"})
        source = (self.folder / file).read_text()
        tried, spent = 0, 0.0
        for group in groups_by_cost([n for n in names if n not in self.flaky], reach.costs):
            cost = sum(reach.costs[name].seconds for name in group)
            if spent + cost > MOST_SECONDS:
                return Verdict(**asdict(verdict) | tried_of("undecided", tried, spent))
            (self.folder / file).write_text(mutant.code)
            try:
                killer = self.run_tests(group, limit=120 + 10 * cost)
            finally:
                (self.folder / file).write_text(source)
            tried, spent = tried + len(group), spent + cost
            if killer is not None and self.passes_without(killer, reach):
                tier = reach.costs[killer].tier
                facts = tried_of("killed", tried, spent) | {"killer": killer, "tier": tier}
                return Verdict(**asdict(verdict) | facts)
        return Verdict(**asdict(verdict) | tried_of("survived", tried, spent))

    def passes_without(self, name: str, reach: Reach) -> bool:
        """Return whether a test passes where nothing is planted; it is tried once."""
        if name not in self.sound | self.flaky:
            limit = 120 + 10 * reach.costs[name].seconds
            passes = self.run_tests([name], limit=limit) is None
            (self.sound if passes else self.flaky).add(name)
        return name in self.sound


PLUGINS = ("-p", "reach_plugin", "-p", "no:cacheprovider")


def tried_of(outcome: str, tests_tried: int, seconds: float) -> dict[str, object]:
    """Return the fields of a verdict that say what was tried."""
    return {"outcome": outcome, "tests_tried": tests_tried, "seconds": round(seconds, 1)}


def groups_by_cost(names: Sequence[str], costs: Mapping[str, TestCost]) -> Iterator[list[str]]:
    """Yield tests in groups of 5, 10, 20, ... seconds, the tiers apart."""
    limit, group, spent = FIRST_SECONDS, [], 0.0
    for name in names:
        if group and (spent >= limit or costs[name].tier != costs[group[-1]].tier):
            yield group
            limit, group, spent = 2 * limit, [], 0.0
        group.append(name)
        spent += costs[name].seconds
    if group:
        yield group


def read_lines(path: Path) -> list[dict]:
    """Return the lines of a JSONL file, none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_environment(folder: Path) -> dict[str, str]:
    """Return the environment of tests in a clone."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    path = os.pathsep.join((str(SCRIPTS), str(folder)))
    kept = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    return {**kept, **settings, "PYTHONPATH": path, "CI": "true"}


def clone(state: Path, name: str, commit: str) -> Checkout:
    """Return a clone at a commit with an environment of its own, made if it is not there."""
    folder = state / name
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, folder], check=True)
    subprocess.run(["git", "fetch", "--quiet", "origin"], cwd=folder, check=True)
    for command in (("checkout", "--quiet", "--force", commit), ("clean", "-dfq")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    environment = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    sync = ["uv", "sync", "--quiet", "--locked", "--group", "mutation"]
    subprocess.run(sync, cwd=folder, env=environment, check=True)
    return Checkout(folder, folder / ".venv" / "bin" / "python", state)


def measure_reach(checkout: Checkout, arguments: Sequence[str]) -> None:
    """Run the tests once, with the lines and the seconds of each."""
    state = checkout.state
    for path in (*state.glob("lines*"), state / "costs.jsonl", state / "tiers.json"):
        path.unlink(missing_ok=True)
    rc = state / "coverage.ini"
    rc.write_text(
        f"[run]\ndata_file = {state / 'lines'}\nparallel = true\npatch = _exit, fork\n"
        f"source = {checkout.folder / 'packages'}\ncontext = ${{LIGHTRFT_TEST-}}\n"
    )
    environment = {
        **test_environment(checkout.folder),
        "LIGHTRFT_COSTS": str(state / "costs.jsonl"),
        "LIGHTRFT_TIERS": str(state / "tiers.json"),
        "COVERAGE_PROCESS_START": str(rc),
    }
    command = [str(checkout.python), "-m", "pytest", *PLUGINS, *arguments]
    subprocess.run(command, cwd=checkout.folder, env=environment, check=False)
    combine = [str(checkout.python), "-m", "coverage", "combine", "--quiet", f"--rcfile={rc}"]
    subprocess.run(combine, cwd=checkout.folder, check=True)


def read_reach(state: Path, folder: Path) -> Reach:
    """Return what `measure_reach` kept."""
    seconds: Counter[str] = Counter()
    failed = set()
    for report in read_lines(state / "costs.jsonl"):
        seconds[report["test"]] += report["seconds"]
        if report["outcome"] != "passed":
            failed.add(report["test"])
    tiers = json.loads((state / "tiers.json").read_text())
    costs = {
        name: TestCost(round(cost, 3), tiers.get(name, FULL))
        for name, cost in seconds.items()
        if name not in failed
    }
    data = CoverageData(str(state / "lines"))
    data.read()

    @lru_cache(4)
    def tests_of(path: str) -> dict[int, frozenset[str]]:
        by_line = data.contexts_by_lineno(str(folder / path))
        # A process that a test starts adds the test's name to its own.
        return {n: frozenset(c.rpartition("|")[2] for c in names) for n, names in by_line.items()}

    return Reach(costs, tests_of)


def draw_faults(folder: Path, areas: Mapping[str, str], count: int, seed: int) -> list:
    """Return pairs of an area and a fault, as many of each area; longer files have more.

    Args:
        folder: Root of the clone; the faults name files from there.
        areas: Folder of each area, from the root.
        count: How many in all.
        seed: The same seed draws the same faults from the same code.
    """
    drawn = []
    for area, place in areas.items():
        draw = random.Random(f"{seed} {area}")
        files = sorted((folder / place).rglob("*.py"))
        sizes = [file.stat().st_size for file in files]
        chosen = Counter(draw.choices(files, sizes, k=-(-count // len(areas))))
        for file, number in chosen.items():
            name = file.relative_to(folder)

            def choose(mutations: list, number: int = number, draw: random.Random = draw) -> list:
                return draw.sample(mutations, min(number, len(mutations)))

            for mutant in mutants_of(file, choose):
                is_python = mutant.compiled() is not None
                changed = Mutant(name, mutant.line, mutant.what, mutant.code, mutant.lines)
                drawn += [(area, changed)] if is_python else []
    return drawn


def plant_faults(checkouts: Sequence[Checkout], reach: Reach, faults: list, kept: Path) -> None:
    """Try all faults that have no verdict yet, one at a time in each clone."""
    done = {(v["file"], v["line"], v["what"]) for v in read_lines(kept)}
    left = [f for f in faults if (str(f[1].path), f[1].line, f[1].what) not in done]
    waiting, lock = iter(left), Lock()

    def work(checkout: Checkout) -> None:
        while True:
            with lock:
                fault = next(waiting, None)
            if fault is None:
                return
            area, mutant = fault
            verdict = checkout.try_fault(mutant, area, reach)
            with lock, kept.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
                print(
                    f"{verdict.outcome}: {verdict.file}:{verdict.line} {verdict.what}", flush=True
                )

    with ThreadPoolExecutor(len(checkouts)) as pool:
        list(pool.map(work, checkouts))


def summary(verdicts: Sequence[Verdict]) -> dict[str, dict[str, int]]:
    """Return for each area how many faults each tier kills, and what came of the others."""
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        word = f"killed by {verdict.tier}" if verdict.outcome == "killed" else verdict.outcome
        counts.setdefault(verdict.area, Counter())[word] += 1
    return {area: dict(sorted(count.items())) for area, count in counts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure reach, plant faults or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("step", choices=("reach", "kill", "table"))
    parser.add_argument("--faults", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "kills")
    arguments, further = parser.parse_known_args(argv)
    state = arguments.state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    kept, at = state / "verdicts.jsonl", state / "commit"
    if arguments.step == "reach":
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
        at.write_text(head)
        kept.unlink(missing_ok=True)
        usual = ["-q", "-n", str(arguments.jobs), "--dist", "worksteal", "-m", "not slow"]
        measure_reach(clone(state, "clone0", head.strip()), [*usual, *further])
        return 0
    commit = at.read_text().strip()
    if arguments.step == "kill":
        checkouts = [clone(state, f"clone{job}", commit) for job in range(arguments.jobs)]
        reach = read_reach(state, checkouts[0].folder)
        areas = {name: AREAS[name] for name in arguments.areas}
        faults = draw_faults(checkouts[0].folder, areas, arguments.faults, arguments.seed)
        plant_faults(checkouts, reach, faults, kept)
        return 0
    verdicts = [Verdict(**verdict) for verdict in read_lines(kept)]
    table = {
        "commit": commit,
        "areas": summary(verdicts),
        "faults": [asdict(v) for v in sorted(verdicts, key=lambda v: (v.file, v.line, v.what))],
    }
    RESULTS.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table["areas"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which test finds which planted fault, and what each test costs.

    uv run --group mutation python scripts/kill_table.py reach     lines and seconds of each test
    uv run --group mutation python scripts/kill_table.py kill      plants faults, one at a time
    uv run --group mutation python scripts/kill_table.py table     benchmarks/results/kills.json

Two cores need about two hours for each of the first two. Both work in a clone of the last commit
under `build/kills`, keep there what they know, and go on where they were stopped: `reach` after the
quick tests, `kill` after any fault.

A fault is one of mutmut's mutations, drawn with a seed from the packages. Of the tests that run its
line, the quick ones are tried first, cheapest first, then the others: the first that fails kills
it. That test must pass without the fault, and is left out from then on if it does not. Faults that
cheap tests leave alive wait until each of the others has had as much: `PASSES`.

Tests may change: `reach` then runs those that are new, and `kill` tries the faults again whose
killer is gone. If the packages have changed, both must begin again: `reach --anew`.
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
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from hashlib import sha256
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
PASSES = (30.0, 120.0, 600.0)  # seconds of tests on one fault before the next one has its turn
QUICK, FULL = "quick", "full"
TIERS = {QUICK: "not slow and not full", FULL: "full and not slow"}


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
    """The outcome of a fault: "killed", "survived", "not reached" or, so far, "undecided"."""

    area: str
    file: str
    line: int
    what: str
    outcome: str = "undecided"
    killer: str | None = None
    tier: str | None = None
    tests_tried: int = 0
    seconds: float = 0.0

    @property
    def fault(self) -> tuple[str, int, str]:
        """The identity of the fault: file, line and changed text."""
        return self.file, self.line, self.what

    @property
    def key(self) -> str:
        """Name of the file with the tests that this fault passed."""
        return sha256(repr(self.fault).encode()).hexdigest()[:16]


@dataclass
class Checkout:
    """A clone in which faults are planted, with the Python that runs its tests."""

    folder: Path
    python: Path
    state: Path
    flaky: set[str] = field(default_factory=set)
    sound: set[str] = field(default_factory=set)
    server: subprocess.Popen[str] | None = None

    def run_tests(self, names: Sequence[str], *, limit: float) -> str | None:
        """Run tests in this order; return the first that fails, None if all pass."""
        costs = self.state / f"{self.folder.name}-costs.jsonl"
        costs.unlink(missing_ok=True)
        listed = self.state / f"{self.folder.name}-tests.txt"
        listed.write_text("\n".join(names))
        arguments = [*PLUGINS, "-x", "-q", "-m", "", f"@{listed}"]
        request = json.dumps({"arguments": arguments, "seconds": limit})
        code = self.answer_of_server(request, costs)
        if code == 0:
            return None
        reports = read_lines(costs)
        failed = [report["test"] for report in reports if report["outcome"] == "failed"]
        # Nothing failed: it hangs, or what the tests import cannot be imported.
        left = [name for name in names if name not in {r["test"] for r in reports}]
        return (failed or left or list(names))[0]

    def answer_of_server(self, request: str, costs: Path) -> int:
        """Return the exit code of a run of pytest in the clone; -1 if it was killed."""
        if self.server is None or self.server.poll() is not None:
            self.server = subprocess.Popen(
                [str(self.python), str(SCRIPTS / "test_server.py")],
                cwd=self.folder,
                env={**test_environment(self.folder), "LIGHTRFT_COSTS": str(costs)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(f"{request}\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline() or -1)

    def try_fault(self, mutant: Mutant, verdict: Verdict, reach: Reach, limit: float) -> Verdict:
        """Plant a fault and try further tests on it.

        Args:
            mutant: The fault.
            verdict: What is known of it.
            reach: Tests of each line.
            limit: Seconds of tests after which the fault stays undecided.
        """
        names = reach.candidates(verdict.file, mutant.lines)
        passed = self.state / "passed" / f"{verdict.key}.txt"
        done = set(passed.read_text().splitlines()) if passed.exists() else set()
        left = [name for name in names if name not in done]
        for group in groups_by_cost(left, reach.costs):
            if verdict.seconds >= limit:
                return replace(verdict, outcome="undecided")
            killer = self.first_killer(mutant, verdict.file, group, reach)
            verdict = replace(
                verdict,
                tests_tried=verdict.tests_tried + len(group),
                seconds=round(verdict.seconds + sum(reach.costs[n].seconds for n in group), 1),
            )
            if killer is not None:
                tier = reach.costs[killer].tier
                return replace(verdict, outcome="killed", killer=killer, tier=tier)
            passed.parent.mkdir(exist_ok=True)
            with passed.open("a") as file:
                file.write("".join(f"{name}\n" for name in group))
        return replace(verdict, outcome="survived" if names else "not reached")

    def first_killer(
        self, mutant: Mutant, file: str, names: Sequence[str], reach: Reach
    ) -> str | None:
        """Return the first of these tests that fails with a fault and passes without it."""
        left = [name for name in names if name not in self.flaky]
        source = (self.folder / file).read_text()
        while left:
            cost = sum(reach.costs[name].seconds for name in left)
            (self.folder / file).write_text(mutant.code)
            try:
                failed = self.run_tests(left, limit=120 + 10 * cost)
            finally:
                (self.folder / file).write_text(source)
            if failed is None or self.passes_without(failed, reach):
                return failed
            left = left[left.index(failed) + 1 :]
        return None

    def passes_without(self, name: str, reach: Reach) -> bool:
        """Return whether a test passes where nothing is planted; it is tried once."""
        if name not in self.sound | self.flaky:
            limit = 120 + 10 * reach.costs[name].seconds
            passes = self.run_tests([name], limit=limit) is None
            (self.sound if passes else self.flaky).add(name)
        return name in self.sound


PLUGINS = ("-p", "reach_plugin", "-p", "no:cacheprovider")


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


def measure_reach(checkout: Checkout, tier: str, options: Sequence[str] = ()) -> None:
    """Run the tests of a tier that were not run yet, with the lines and the seconds of each."""
    state, pytest = checkout.state, [str(checkout.python), "-m", "pytest", *PLUGINS]
    environment = {**test_environment(checkout.folder), "LIGHTRFT_COSTS": os.devnull}
    command = [*pytest, "-m", TIERS[tier], "--collect-only", "-q"]
    lines = subprocess.run(
        command, cwd=checkout.folder, env=environment, check=False, capture_output=True, text=True
    ).stdout.splitlines()
    names = [line for line in lines if "::" in line and not line.startswith(("SKIPPED", " "))]
    (state / f"{tier}-tests.txt").write_text("\n".join(names))
    costs = state / "costs.jsonl"
    known = {report["test"] for report in read_lines(costs)}
    chosen = []
    if not known.isdisjoint(names):
        listed = state / f"{tier}-new.txt"
        listed.write_text("\n".join(name for name in names if name not in known))
        chosen = [f"@{listed}"]
    rc = state / "coverage.ini"
    rc.write_text(
        f"[run]\ndata_file = {state / 'lines'}\nparallel = true\npatch = _exit, fork\n"
        f"source = {checkout.folder / 'packages'}\ncontext = ${{LIGHTRFT_TEST-}}\n"
    )
    environment |= {"LIGHTRFT_COSTS": str(costs), "COVERAGE_PROCESS_START": str(rc)}
    command = [*pytest, "-q", "-m", TIERS[tier], *options, *chosen]
    subprocess.run(command, cwd=checkout.folder, env=environment, check=False)
    combine = [str(checkout.python), "-m", "coverage", "combine", "--append", "--quiet"]
    subprocess.run([*combine, f"--rcfile={rc}"], cwd=checkout.folder, check=False)
    (state / f"{tier}-done").touch()


def read_reach(state: Path, folder: Path) -> Reach:
    """Return what `measure_reach` kept of the tests that there are."""
    seconds: Counter[str] = Counter()
    failed = set()
    for report in read_lines(state / "costs.jsonl"):
        seconds[report["test"]] += report["seconds"]
        if report["outcome"] != "passed":
            failed.add(report["test"])
    tiers = {
        name: tier
        for tier in TIERS
        if (state / f"{tier}-done").exists()
        for name in (state / f"{tier}-tests.txt").read_text().splitlines()
    }
    costs = {
        name: TestCost(round(seconds[name], 3), tier)
        for name, tier in tiers.items()
        if name in seconds and name not in failed
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
    # So that a table which is stopped early has some of each area.
    random.Random(seed).shuffle(drawn)
    return drawn


def plant_faults(checkouts: Sequence[Checkout], reach: Reach, faults: list, kept: Path) -> None:
    """Try all faults that are undecided, one at a time in each clone.

    Args:
        checkouts: Clones that work side by side.
        reach: Tests of each line.
        faults: Pairs of an area and a fault.
        kept: File to which verdicts are added.
    """
    lock = Lock()
    verdicts = {verdict.fault: verdict for verdict in read_verdicts(kept)}

    def is_left(verdict: Verdict, limit: float) -> bool:
        if verdict.outcome == "killed":
            return verdict.killer not in reach.costs
        return verdict.seconds < limit

    def work(checkout: Checkout, waiting: Iterator[tuple[Verdict, Mutant]], limit: float) -> None:
        while True:
            with lock:
                verdict, mutant = next(waiting, (None, None))
            if verdict is None or mutant is None:
                return
            before = replace(verdict, outcome="undecided", killer=None, tier=None)
            now = checkout.try_fault(mutant, before, reach, limit)
            if now == verdict:
                continue
            with lock, kept.open("a") as file:
                verdicts[now.fault] = now
                file.write(json.dumps(asdict(now)) + "\n")
                print(f"{now.outcome}: {' '.join(map(str, now.fault))}", flush=True)

    for limit in PASSES:
        pairs = []
        for area, mutant in faults:
            verdict = Verdict(area, str(mutant.path), mutant.line, mutant.what)
            verdict = verdicts.get(verdict.fault, verdict)
            if is_left(verdict, limit):
                pairs.append((verdict, mutant))
        waiting = iter(pairs)
        with ThreadPoolExecutor(len(checkouts)) as pool:
            list(pool.map(partial(work, waiting=waiting, limit=limit), checkouts))


def read_verdicts(kept: Path) -> list[Verdict]:
    """Return the last verdict of each fault."""
    verdicts = (Verdict(**line) for line in read_lines(kept))
    return list({verdict.fault: verdict for verdict in verdicts}.values())


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
    parser.add_argument("--anew", action="store_true", help="reach: forget an earlier commit")
    arguments, further = parser.parse_known_args(argv)
    state = arguments.state.resolve()
    if arguments.step == "reach":
        begin_reach(state, arguments.anew)
        checkout = clone(state, "clone0", (state / "commit").read_text())
        spread = [f"-n{arguments.jobs}", "--dist=worksteal"]
        for tier in TIERS:
            if not (state / f"{tier}-done").exists():
                measure_reach(checkout, tier, [*spread, *further])
        return 0
    commit, kept = (state / "commit").read_text(), state / "verdicts.jsonl"
    if arguments.step == "kill":
        checkouts = [clone(state, f"clone{job}", commit) for job in range(arguments.jobs)]
        reach = read_reach(state, checkouts[0].folder)
        areas = {name: AREAS[name] for name in arguments.areas}
        faults = draw_faults(checkouts[0].folder, areas, arguments.faults, arguments.seed)
        plant_faults(checkouts, reach, faults, kept)
        return 0
    verdicts = read_verdicts(kept)
    table = {
        "commit": commit,
        "areas": summary(verdicts),
        "faults": [asdict(v) for v in sorted(verdicts, key=lambda v: v.fault)],
    }
    RESULTS.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table["areas"], indent=1))
    return 0


def begin_reach(state: Path, anew: bool) -> None:
    """Name the commit whose tests are run; forget what another one's packages make untrue."""
    state.mkdir(parents=True, exist_ok=True)
    commit = state / "commit"
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    if anew:
        for path in (
            *state.glob("*.*"),
            *state.glob("lines*"),
            *state.glob("*-done"),
            *state.glob("passed/*"),
            commit,
        ):
            path.unlink(missing_ok=True)
    elif commit.exists() and commit.read_text() != head:
        compare = ["git", "diff", "--quiet", commit.read_text(), head, "--", "packages"]
        if subprocess.run(compare, cwd=ROOT, check=False).returncode:
            sys.exit(f"the packages have changed since {commit.read_text()[:8]}: reach --anew")
        for path in state.glob("*-done"):
            path.unlink()
    commit.write_text(head)


if __name__ == "__main__":
    sys.exit(main())

"""The quick tests cover each long table, and a fault of the table is told which test found it."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.programs import load_script
from tests.tiers import MOST_CASES, cover, mark_long_tables

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def first(count, names, indices):
    places = cover(names, indices)
    return [next(places) for _ in range(count)]


def test_a_cover_has_every_value_of_every_parameter_before_it_repeats_one():
    indices = [{"loss": i, "mode": j} for i in range(15) for j in range(9)]
    names = [f"case[{i}-{j}]" for i in range(15) for j in range(9)]
    chosen = [indices[place] for place in first(MOST_CASES, names, indices)]
    assert {case["loss"] for case in chosen} == set(range(15))
    assert {case["mode"] for case in chosen} == set(range(9))


def test_a_cover_is_spread_over_a_table_of_one_parameter_and_holds_when_a_case_is_added():
    names = [f"case[{i}]" for i in range(200)]
    indices = [{"row": i} for i in range(200)]
    chosen = first(MOST_CASES, names, indices)
    assert sum(place < 100 for place in chosen) in range(4, 17)
    more = first(MOST_CASES, [*names, "case[200]"], [*indices, {"row": 200}])
    assert len({*chosen} - {*more}) <= 1


class Case:
    """A case of a table, as pytest collects it."""

    def __init__(self, number, *marks):
        self.nodeid, self.function = f"case[{number}]", Case
        self.callspec = SimpleNamespace(indices={"row": number})
        self.marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, mark):
        self.marks[mark.name] = mark


@pytest.mark.parametrize(
    "marks, cases, quick",
    [((), 20, 20), ((), 30, 20), ((pytest.mark.cover(2).mark,), 7, 2)],
    ids=["as long as may be", "longer", "of long cases"],
)
def test_a_table_has_so_many_quick_cases(marks, cases, quick):
    table = [Case(number, *marks) for number in range(cases)]
    mark_long_tables([*table, Case(99, pytest.mark.slow.mark)])
    assert sum("full" not in case.marks for case in table) == quick


@pytest.fixture(scope="module")
def kill_table():
    pytest.importorskip("libcst", reason="the group mutation is not installed")
    pytest.importorskip("coverage", reason="the group mutation is not installed")
    sys.path.insert(0, str(SCRIPTS))
    try:
        return load_script(SCRIPTS / "kill_table.py")
    finally:
        sys.path.remove(str(SCRIPTS))


TOY = {
    "packages/toy/sums.py": """
def double(x):
    return x + x


def sign(x):
    if x < 0:
        return -1
    return 1


def unused(x):
    return x + 7
""",
    "tests/ranks.py": "_PRELOADED = []\n",
    "tests/__init__.py": "",
    "tests/test_toy.py": """
import sys, subprocess, pytest
sys.path.insert(0, "packages")
from toy.sums import double, sign

def test_double():
    assert double(3) == 6

def test_looks_at_nothing():
    double(3), sign(3)

@pytest.mark.full
def test_sign_in_a_process():
    code = "import sys; sys.path.insert(0, 'packages'); from toy.sums import sign; print(sign(-2))"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"-1\\n"

def test_is_red_anyway():
    assert double(3) == 7
""",
    "pytest.ini": "[pytest]\nmarkers =\n    full\n    slow\n",
}


def outcomes_by_line(verdicts):
    by_line = {}
    for verdict in verdicts:
        killer = (verdict.killer or "").rpartition("::")[2]
        by_line.setdefault(verdict.line, set()).add((verdict.outcome, killer))
    return by_line


@pytest.mark.slow
@pytest.mark.shard("audit_rest")
def test_faults_are_killed_by_the_cheapest_test_that_sees_them(kill_table, tmp_path, monkeypatch):
    folder, state = tmp_path / "clone0", tmp_path
    for name, text in TOY.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    checkout = kill_table.Checkout(folder, Path(sys.executable), state)
    kept, run = state / "verdicts.jsonl", partial(kill_table.measure_reach, checkout)
    run(kill_table.QUICK)
    quick = kill_table.read_reach(state, folder)
    faults = kill_table.draw_faults(folder, {"toy": "packages/toy"}, 1000, seed=0)
    kill_table.plant_faults([checkout], quick, faults, kept)
    by_quick = kill_table.read_verdicts(kept)
    assert len(by_quick) == len(faults)
    assert {v.outcome for v in by_quick if v.line == 8} == {"not reached"}

    run(kill_table.FULL)
    reach = kill_table.read_reach(state, folder)
    assert "tests/test_toy.py::test_is_red_anyway" not in reach.costs
    kill_table.plant_faults([checkout], reach, faults, kept)
    by_line = outcomes_by_line(kill_table.read_verdicts(kept))
    assert by_line[3] == {("killed", "test_double")}
    assert ("killed", "test_sign_in_a_process") in by_line[8]
    assert by_line[13] == {("not reached", "")}
    assert any(outcome == "survived" for line in (7, 9) for outcome, _ in by_line[line])
    assert (folder / "packages/toy/sums.py").read_text() == TOY["packages/toy/sums.py"]

"""Which tests the usual command runs: the quick ones, and a cover of each long table.

A test without a marker is quick. `full` marks what takes longer than a few seconds, and the cases
of a table that its cover leaves out; `cover(2)` marks a table of long cases of which two are quick.
`.ci/run` runs both, the quick ones first.
"""

import itertools
from hashlib import blake2s

import pytest

MOST_CASES = 20  # of a table that are quick
QUICK_SECONDS = 5.0  # a quick test on a core that nothing else uses
MOST_SECONDS = 30.0  # above it a run of the tests fails: no noise makes it six times as long


def mark_long_tables(items):
    """Mark the cases of long tables as full, but for those of a cover.

    Args:
        items: Collected tests; those that are slow or full already do not count.
    """
    tables = {}
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("full"):
            continue
        if getattr(item, "callspec", None) is not None:
            tables.setdefault(getattr(item, "function", item), []).append(item)
    for table in tables.values():
        marker = table[0].get_closest_marker("cover")
        most = MOST_CASES if marker is None else marker.args[0]
        if len(table) > most:
            indices = [item.callspec.indices for item in table]
            names = [item.nodeid for item in table]
            quick = set(itertools.islice(cover(names, indices), most))
            for place, item in enumerate(table):
                if place not in quick:
                    item.add_marker(pytest.mark.full)


def cover(names, indices):
    """Yield the places of cases, those first that have most values which no earlier one has.

    Args:
        names: Of equal cases the one whose name has the smaller checksum comes first, so that the
            choice is spread over a table, the same everywhere, and hardly moves with a new case.
        indices: For each case, the place of each parameter's value.
    """
    left = sorted(range(len(names)), key=lambda place: blake2s(names[place].encode()).digest())
    seen = set()
    while left:
        best = max(left, key=lambda place: len(indices[place].items() - seen))
        left.remove(best)
        seen |= indices[best].items()
        yield best

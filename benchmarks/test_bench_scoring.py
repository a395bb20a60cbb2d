"""Finding the final answer of a hostile response, beside one pass of a pattern over the same text.

pytest benchmarks/test_bench_scoring.py -s
"""

from __future__ import annotations

import re

import harness
import pytest
import torch

from lightrft.tools.rewards.math_rules import last_boxed

NUM_CHARACTERS = 32_000
BRACES = re.compile(r"\\.|[{}]", flags=re.DOTALL)
BUDGET_SECONDS = 1.0


@pytest.mark.parametrize("piece", ["\\boxed{", "\\boxed{{}", "{}", "word \\boxed{1} "])
def test_a_hostile_response_is_scored_in_milliseconds(piece, record_property):
    text = piece * (NUM_CHARACTERS // len(piece)) + "}"
    providers = {
        "last_boxed": lambda: last_boxed(text),
        "pattern": lambda: [match[0] for match in BRACES.finditer(text)],
    }
    timings = harness.interleave(providers, torch.device("cpu"), BUDGET_SECONDS)
    # The fastest round: other programs only ever add to it.
    found, floor = (min(timings[name].seconds) for name in providers)
    record_property("seconds", found)
    print(f"\n{piece!r}: {1e3 * found:.2f} ms, {found / floor:.1f} times one pass of the pattern")
    if "boxed" in piece:
        assert found < 0.010

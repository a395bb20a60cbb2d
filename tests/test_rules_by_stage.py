"""Rules by stages: a cell is the test of a rule in a stage, or the reason why none applies."""

import inspect

import pytest
from tests.rules import dropout, ends, messages, texts, vocabulary
from tests.rules.stages import PENDING, STAGES

RULES = {
    "dropout is off while scoring and updating": dropout.CELLS,
    "responses end at every declared end": ends.CELLS,
    "prompts do not end in the end of a text": texts.OPEN_PROMPTS,
    "a text begins once": texts.ONE_BEGINNING,
    "nulls of Arrow are stripped": messages.NULLS,
    "arguments are text or object": messages.ARGUMENTS,
    "calls need no arguments": messages.BARE_CALLS,
    "parts of a content are joined": messages.PARTS,
    "begun answers are continued or refused": messages.BEGUN_ANSWERS,
    "ids beyond the vocabulary are neither sampled nor trained": vocabulary.CELLS,
    "unread columns and keys are named": messages.UNREAD,
    "turns marked untrained are untrained": messages.UNTRAINED,
    "labels that are NaN are absent": messages.NOT_A_NUMBER,
    "lengths are known before the run": texts.LENGTHS,
}
TESTS = [
    pytest.param(stage, cell, id=f"{rule}: {stage}")
    for rule, row in RULES.items()
    for stage, cell in row.items()
    if not isinstance(cell, str)
]


@pytest.mark.parametrize("stage, cell", TESTS)
def test_a_rule_holds_in_a_stage(request, stage, cell):
    names = inspect.signature(cell).parameters
    cell(**{name: stage if name == "stage" else request.getfixturevalue(name) for name in names})


def test_every_cell_is_a_test_or_a_sentence():
    for rule, row in RULES.items():
        assert tuple(row) == STAGES, rule
        for stage, cell in row.items():
            if isinstance(cell, str) and cell != PENDING:
                is_sentence = cell[:1].isupper() and cell.endswith(".") and len(cell.split()) > 4
                assert is_sentence, f"{rule}, {stage}: {cell!r}"


def test_no_cell_is_pending():
    pending = [
        f"{rule}: {stage}" for rule, row in RULES.items() for stage in row if row[stage] == PENDING
    ]
    assert not pending, pending

"""Measures of prose stay within the accepted values, and worse prose is counted."""

from pathlib import Path

from scripts import measure_words as measures

ROOT = Path(__file__).resolve().parent.parent
PLAIN = '''"""Rows."""


def size(rows):
    """Return the number of rows.

    Args:
        rows: Rows of a file.
    """
    return len(rows)
'''


def values(root, source):
    path = root / "packages/trainer/src/lightrft/rows.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    (root / "README.md").write_text("# Rows\n\nRows are read. They are counted once.\n")
    return {name: value for name, (value, _) in measures.measure(root).items()}


def test_prose_is_no_worse_than_accepted():
    measured = measures.measure(ROOT)
    accepted = measures.read_accepted(ROOT)
    assert measured.keys() == accepted.keys()
    worse = {name: value for name, (value, _) in measured.items() if value > accepted[name]}
    assert worse == {}, "see scripts/measure_words.py"


def test_words_docstrings_and_parameters_are_counted(tmp_path):
    plain = values(tmp_path, PLAIN)
    assert [plain[name] for name in ("vague_words", "noun_docstrings", "vague_parameters")] == [
        0
    ] * 3
    assert plain["words_per_sentence"] == 35
    dialect = PLAIN.replace("Return the number of", "The number of given").replace(
        "rows: Rows", "rows: Of own rows, those"
    )
    dialect = dialect.replace("return", "found_rows = 1\n    return")
    asks = '@property\ndef is_empty(rows):\n    """Whether there are none."""\n'
    worse = values(tmp_path, dialect + asks)
    assert worse["vague_words"] == 3
    assert worse["noun_docstrings"] == 2
    assert worse["vague_parameters"] == 1

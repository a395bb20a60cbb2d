"""Measures of the code stay within the accepted values, and a worse tree is found."""

import ast
from pathlib import Path

import pytest
from tests.programs import load_script

ROOT = Path(__file__).resolve().parent.parent
measures = load_script(ROOT / "scripts/measure_code.py")

SMALL = '"""Numbers."""\n\nN = 1\n'
CLEAN = {
    "trainer/spmd_ppo_trainer.py": (
        '"""Trainer."""\nfrom lightrft.trainer.small import N\n'
        "def size(a):\n    return 1 if a else N\n"
    ),
    "trainer/other.py": "from lightrft.trainer import small\n" + "X = small.N\n" * 60,
    "trainer/small.py": SMALL,
    "tools/page.py": "def page():\n    import lightrft.trainer.other\n",
}


def tree(root, **changed):
    """Values of a small tree in which some files are others."""
    for name, text in (CLEAN | changed).items():
        path = root / "packages/trainer/src/lightrft" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return measures.measure(root)


def values(found):
    return {name: each.value for name, each in found.items()}


@pytest.mark.full
def test_the_code_is_no_worse_than_accepted():
    found = measures.measure(ROOT)
    assert not measures.excesses(found, measures.read_accepted(ROOT)), "see scripts/measure_code.py"


@pytest.mark.shard("measures")
@pytest.mark.slow
def test_a_run_executes_no_more_files_than_accepted():
    found = measures.measure_run(ROOT)
    assert found["step_files"].value > 20
    assert not measures.excesses(found, measures.read_accepted(ROOT)), "see scripts/measure_code.py"


def test_every_measure_has_an_accepted_value():
    assert set(measures.read_accepted(ROOT)) == {
        *measures.measure(Path("/nowhere")),
        "sft_step_files",
        "sft_command_files",
        "step_files",
        "command_files",
    }


def test_a_capability_adds_its_tokens_and_says_why(tmp_path):
    path = tmp_path / "scripts/accepted_code.toml"
    path.parent.mkdir()
    added = '[added."proof"]\ncore_tokens = 5\n'
    path.write_text(f'core_tokens = 10\n{added}reason = "It finds wrong heads."\n')
    assert measures.read_accepted(tmp_path) == {"core_tokens": 15}
    path.write_text(f"core_tokens = 10\n{added}")
    with pytest.raises(ValueError, match="has no reason"):
        measures.read_accepted(tmp_path)
    path.write_text(f'core_token = 10\n{added}reason = "It finds wrong heads."\n')
    with pytest.raises(ValueError, match="is no measure"):
        measures.read_accepted(tmp_path)


def test_a_folder_above_its_budget_is_named(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / measures.ACCEPTED).write_text("[folders]\ntrainer = 10\ntools = 11\n")
    assert tree(tmp_path)["folders_above"].places == ["trainer: 329, accepted 10"]
    with (tmp_path / measures.ACCEPTED).open("a") as file:
        file.write('[added."loops"]\nfolders.trainer = 319\nreason = "they repeat"\n')
    assert tree(tmp_path)["folders_above"].places == []
    assert measures.read_accepted(tmp_path) == {}


def test_published_signatures_exist():
    modules = measures.read_modules(ROOT)
    for entry in measures.PUBLISHED:
        module, _, name = entry.partition(":")
        assert name in dict(modules[module].functions()), entry


def test_numbers_of_a_small_tree(tmp_path):
    found = values(tree(tmp_path))
    assert found["core_tokens"] == 20 + (6 + 60 * 5) + 3
    assert found["tools_tokens"] == 5 + 6
    assert found["all_tokens"] == found["core_tokens"] + found["tools_tokens"]
    # The trainer and `small`; `other` is imported within a function of the tools.
    assert found["trainer_closure"] == 2
    zero = set(found) - {"core_tokens", "tools_tokens", "all_tokens", "trainer_closure"}
    assert {name: found[name] for name in zero} == dict.fromkeys(zero, 0)


HEAD = CLEAN["trainer/spmd_ppo_trainer.py"]
WORSE = {
    "core_tokens": HEAD + "X = 1\n",
    "long_functions": HEAD + "def f():\n" + "    x = 1\n" * 60,
    "wide_functions": HEAD + "def f(self, a, b, c, d, /, e, f, *, g, h):\n    pass\n",
    "complex_functions": HEAD + "def f(a):\n    return " + "a or " * 15 + "a\n",
    "format_skips": HEAD + "X = [1,\n 2]  # fmt: skip\n",
    "question_docstrings": HEAD + 'class Run:\n    """What a run trains."""\n',
    "trainer_closure": HEAD + "import lightrft.trainer.other\n",
}


@pytest.mark.parametrize("name", WORSE)
def test_a_worse_file_is_named(tmp_path, name):
    accepted = values(tree(tmp_path))
    worse = tree(tmp_path, **{"trainer/spmd_ppo_trainer.py": WORSE[name]})
    messages = {text.partition(":")[0]: text for text in measures.excesses(worse, accepted)}
    assert set(messages) - {"core_tokens", "all_tokens"} == {name} - {"core_tokens"}
    assert f"accepted {accepted[name]}" in messages[name]
    if name not in ("core_tokens", "trainer_closure"):
        assert "packages/trainer/src/lightrft/trainer/spmd_ppo_trainer.py:" in messages[name]


def test_a_small_module_for_one_importer_is_named(tmp_path):
    accepted = values(tree(tmp_path))
    worse = tree(tmp_path, **{"trainer/other.py": "X = 1\n" * 60})
    [text] = measures.excesses({"small_modules": worse["small_modules"]}, accepted)
    assert "small.py (1 lines, only for lightrft.trainer.spmd_ppo_trainer)" in text


def test_docstrings_comments_and_layout_cost_no_tokens(tmp_path):
    text = '"""Text.\n\nMore.\n"""\n\n# A comment.\n\n\nN = (\n    1\n)\n'
    before, after = tree(tmp_path), tree(tmp_path, **{"trainer/small.py": text})
    assert after["core_tokens"].value == before["core_tokens"].value + 2


@pytest.mark.parametrize(
    "body, expected",
    [
        ("pass", 1),
        ("if a: pass\n elif b: pass\n else: pass", 3),
        ("for x in a: pass\n while b: pass", 3),
        ("try: pass\n except A: pass\n except B: pass\n finally: pass", 3),
        ("return a and b and (c or d)", 4),
        ("return [x for x in a for y in b if x]", 3),
        ("assert a\n return b if c else d", 3),
        ("match a:\n  case 1: pass\n  case _: pass", 3),
        ("def inner():\n  return a or b", 1),
    ],
)
def test_complexity_counts_ways(body, expected):
    function = ast.parse(f"def f():\n {body}\n").body[0]
    assert measures.complexity(function) == expected


def test_classes_of_one_name_and_records_of_one_place_are_named(tmp_path):
    record = "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass %s:\n    a: int\n"
    does = record % "Does" + "    def work(self):\n        pass\nX = Does(1)\n"
    twice = record % "Twice" + "X = Twice(1), Twice(2)\n"
    read = record % "Read" + "X = read(list[Read]), isinstance(Read(1), Read)\n"
    tree(
        tmp_path,
        **{
            "trainer/other.py": record % "Once" + "X = isinstance(Once(1), Once)\n",
            "trainer/small.py": "class _Once:\n    pass\n" + SMALL + does + twice + read,
        },
    )
    found = measures._class_measures(measures.read_modules(tmp_path))
    [name] = found["repeated_class_names"].places
    [place] = found["single_use_records"].places
    assert name.startswith("Once: ")
    assert place == "packages/trainer/src/lightrft/trainer/other.py:3 Once"

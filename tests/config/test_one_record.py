"""An option is written twice: where it is declared and where it is used."""

import ast
import time
from pathlib import Path

import pytest

from lightrft.config import TrainConfig
from lightrft.config.options import check_value, options_of, type_hints

ROOT = Path(__file__).parents[2]
OPTIONS = {name: entry.default for name, (entry, _) in options_of(TrainConfig).items()}
# Defaults that say nothing: a second one of these is no second decision.
NEUTRAL = (None, False, True, 0, 1, -1, 0.0, 1.0, "", ())
# The public interfaces of packages that are used alone have names of their own.
ALONE = ("packages/engines/", "packages/kernels/")
DECLARATIONS = "/config/parts/"
COLLECTIONS = {
    f"packages/{path}.py": reason
    for path, reason in {
        "strategy/src/lightrft/utils/arguments": "the flags of the published interface",
        "trainer/src/lightrft/rollout/agents/messages": "fields of OpenAI's protocol",
        "trainer/src/lightrft/rollout/agents/rounds": "fields of OpenAI's protocol",
        "trainer/src/lightrft/tools/report/chain": "the words for each model of a run",
    }.items()
}
"""Files in which option names may be listed by hand, with the reason."""
# Classes with fields of these names, with the reason.
CLASSES = {"packages/trainer/src/lightrft/models/support.py": "what a forward pass replays"}
DEFAULTS = {
    f"packages/strategy/src/lightrft/strategy/{name}.py": ("seed", "the published constructors")
    for name in ("fake", "deepspeed/strategy", "fsdp2/strategy")
}
"""A parameter of a file whose default may equal the option's, with the reason."""


def sources():
    files = sorted(ROOT.glob("packages/*/src/**/*.py"))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def classes_that_repeat_options(path, tree):
    if path.startswith(ALONE) or DECLARATIONS in path or path in CLASSES:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
            repeated = [name for name in fields if name in OPTIONS]
            if len(repeated) >= 3:
                found.append(f"{path}: class {node.name} repeats {', '.join(repeated)}")
    return found


def second_defaults(path, tree):
    if path.startswith(ALONE) or DECLARATIONS in path:
        return []
    pairs: list[tuple[str, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            positional = [*node.args.posonlyargs, *node.args.args]
            last = positional[len(positional) - len(node.args.defaults) :]
            pairs += [(arg.arg, value) for arg, value in zip(last, node.args.defaults, strict=True)]
            keyword_only = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            pairs += [(arg.arg, value) for arg, value in keyword_only if value is not None]
        elif isinstance(node, ast.ClassDef):
            pairs += [
                (item.target.id, item.value)
                for item in node.body
                if isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and item.value is not None
            ]
    found = []
    for name, value in pairs:
        try:
            default = ast.literal_eval(value)
        except ValueError:
            continue
        if name in OPTIONS and default not in NEUTRAL and default == OPTIONS[name]:
            found.append(f"{path}: {name} = {default!r} is the option's default once more")
    return found


def is_text(node):
    if isinstance(node, ast.Tuple | ast.List):
        return all(map(is_text, node.elts))
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def lists_of_options(path, tree):
    found = []
    for node in ast.walk(tree):
        items: list[ast.expr | None] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            items = list(node.elts)
        elif isinstance(node, ast.Dict) and all(map(is_text, node.values)):
            # A mapping to other values sets the options: that is their use.
            items = list(node.keys)
        names = [item.value for item in items if isinstance(item, ast.Constant)]
        options = [name for name in names if isinstance(name, str) and name in OPTIONS]
        if len(options) >= 3 and len(options) * 2 > len(items):
            found.append(f"{path}:{node.lineno} lists {', '.join(options)}")
    return found


def violations(path, text):
    tree = ast.parse(text)
    found = classes_that_repeat_options(path, tree)
    allowed, _ = DEFAULTS.get(path, ("", ""))
    found += [line for line in second_defaults(path, tree) if f": {allowed} = " not in line]
    return found + ([] if path in COLLECTIONS else lists_of_options(path, tree))


@pytest.mark.full
def test_no_source_file_repeats_what_the_record_says():
    assert [line for path, text in sources().items() for line in violations(path, text)] == []


@pytest.mark.parametrize(
    "planted",
    [
        "class Settings:\n    gamma: float\n    lambd: float\n    seed: int\n",
        "def load(path, *, prompt_max_len=1024): ...\n",
        'FREE = {"seed", "gamma", "lambd"}\n',
        'HELP = {"seed": "of numbers", "gamma": "a discount", "lambd": "a mixture"}\n',
    ],
)
def test_a_planted_repetition_is_caught(planted):
    assert len(violations("packages/trainer/src/lightrft/trainer/planted.py", planted)) == 1


def test_every_exception_is_needed():
    texts = sources()
    assert all(lists_of_options(path, ast.parse(texts[path])) for path in COLLECTIONS)


def unknown_names(tree):
    """Attributes that functions of one parameter read from it and that no configuration has."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and len(node.args.args) == 1:
            (parameter,) = node.args.args
            names |= {
                part.attr
                for part in ast.walk(node.body)
                if isinstance(part, ast.Attribute)
                and isinstance(part.value, ast.Name)
                and part.value.id == parameter.arg
            }
    return {name for name in names if not hasattr(TrainConfig, name)}


def test_rules_of_parts_read_options_alone():
    parts = [text for path, text in sources().items() if DECLARATIONS in path]
    assert parts
    assert unknown_names(ast.parse("\n".join(parts).replace("from __future__", "#"))) == set()
    assert unknown_names(ast.parse("lambda c: c.sede")) == {"sede"}


def test_rules_cost_no_more_than_a_few_readings_of_all_options():
    """A start makes dozens of records: 2 ms each, and not 35."""
    hints, options = type_hints(TrainConfig), options_of(TrainConfig)

    def check_values(values):
        for name, (_, info) in options.items():
            check_value(name, values[name], hints[name], info)

    values = vars(TrainConfig())
    assert least_seconds(TrainConfig) < 5 * least_seconds(lambda: check_values(values))


def least_seconds(work):
    seconds = []
    for _ in range(10):
        begun = time.process_time()
        work()
        seconds.append(time.process_time() - begun)
    return min(seconds)

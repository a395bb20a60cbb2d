r"""Measures of the code, each of which is to be no worse than `accepted_code.toml` says.

    python scripts/measure_code.py [ROOT]         measures of the tree at ROOT, by default this one
    python scripts/measure_code.py [ROOT] --run   measures of a run beside them, with ROOT's .venv
    python scripts/measure_code.py [ROOT] --list  names the places that are counted, too

All but `tests_tokens` look at `packages`. The tools are `lightrft.tools`, the core is all the rest.

core_tokens, tools_tokens, all_tokens, tests_tokens: Python tokens without comments, line ends and
    indentation, less one for each docstring; all are those of core and tools.
native_tokens, page_tokens: words and single signs (`\w+|[^\w\s]`) of C++ and CUDA without
    comments, and of JavaScript and Jinja with everything.
long_functions: functions of more than 60 lines from `def` to their end, docstring included; of a
    Triton kernel, whose parameters take a line each, the lines of its body.
wide_functions: functions of more than 8 named parameters, `self` included, that are neither Triton
    kernels nor named in PUBLISHED.
complex_functions: functions of a complexity above 15. It is 1 and one more for each if, elif, loop,
    except, case, assert, conditional expression, `for` of a comprehension, and each operand after
    the first of `and` and `or`; a function in another one counts for itself as well. This is
    stricter than ruff's C901, which leaves out expressions and is held to 12 by ruff.
small_modules: modules of fewer than 60 lines of code (neither docstring, comment nor blank) that
    exactly one other module imports, anywhere but under TYPE_CHECKING; packages apart.
format_skips: comments `# fmt: skip`.
question_docstrings: classes and modules, in thousands of those with a docstring, whose docstring
    begins with What, How, Who, Whom, Whose, Which, Where, Why, When or Those.
folders_above: folders of `lightrft`, and of its tools, with more tokens than the table `folders`
    of `accepted_code.toml` says; one that it does not name has a budget of 0.
whole_records: functions that take all options of a run (or of a strategy) instead of a part's.
strategy_parameters: parameters that are a whole strategy.
repeated_class_names: names that classes of two or more files have, leading underscores left out.
single_use_records: dataclasses and named tuples without methods (properties apart) that one call
    constructs. Handing the class to another function is such a call, too, as readers of files ask
    for it; classes of one name are counted together.
trainer_closure: modules that `lightrft.trainer.spmd_ppo_trainer` imports when it is imported,
    directly or not, itself included; of packages only those that an import names.
sft_closure, train_closure: the same of `lightrft sft` and `lightrft train`.
step_files, command_files: with --run; files of which a function is called in the process of
    `lightrft train` during the second of three GRPO steps (from one line of metrics.jsonl to the
    next), and during the whole command, where importing counts, too.
sft_step_files, sft_command_files: the same of `lightrft sft` on answers.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES, MAX_PARAMETERS, MAX_COMPLEXITY, SMALL = 60, 8, 15, 60
ACCEPTED = "scripts/accepted_code.toml"
_RUN = ("lightrft.cli.main", "lightrft.run.assembly")
# Modules that a run begins with, by the measure of what they import.
DOORS = {
    "trainer_closure": ("lightrft.trainer.spmd_ppo_trainer",),
    "sft_closure": (
        *_RUN,
        "lightrft.cli.row_commands",
        "lightrft.stages.supervised.supervised_inputs",
    ),
    "train_closure": (*_RUN, "lightrft.cli.train", "lightrft.stages.policy.inputs"),
}
# Signatures that are published: users' code and the options follow them.
PUBLISHED = {
    "lightrft.strategy.strategy_base:StrategyBase.setup_dataloader": "given by the interface",
    "lightrft.strategy.strategy_base:StrategyBase.save_ckpt": "given by the interface",
    "lightrft.strategy.strategy_base:StrategyBase.load_ckpt": "given by the interface",
    "lightrft.strategy.strategy_base:StrategyBase.gather_and_generate": "given by the interface",
    "lightrft.trainer.spmd_ppo_trainer:PPOTrainer.__init__": "given by the interface",
    "lightrft.models.actor:Actor.forward": "the call that all policies have in common",
    "lightrft.algorithms.policy.covariance:clip_cov_policy_loss": "its keywords are options",
    "lightrft.kernels.logprob.dispatch:linear_logprob": "an operator, as torch's own have them",
    "lightrft.kernels.logprob.policy_loss:linear_policy_loss": "an operator likewise",
    "lightrft.config.options:option": "a declaration whose keywords are its columns",
}
_QUESTION = re.compile(r"(What|How|Who|Whom|Whose|Which|Where|Why|When|Those)\b")
_SIGNS = re.compile(r"\w+|[^\w\s]")
_NATIVE_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.match_case,
    ast.Assert,
    ast.IfExp,
    ast.comprehension,
)


@dataclass(frozen=True)
class Measured:
    """A number, and the places that it counts where it counts places."""

    value: int
    places: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Module:
    """A Python file of a package."""

    name: str
    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        """The file's syntax."""
        return ast.parse(self.source)

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """All tokens but layout and comments; docstrings are among them."""
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        return [token for token in tokens if token.type not in _LAYOUT]

    @cached_property
    def docstrings(self) -> list[tuple[ast.AST, ast.stmt]]:
        """What has a docstring, and the docstring."""
        kinds = ast.Module | ast.ClassDef | _Function
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, kinds)]
        return [(node, node.body[0]) for node in nodes if ast.get_docstring(node) is not None]

    @property
    def num_tokens(self) -> int:
        """Tokens less one for each docstring."""
        return len(self.tokens) - len(self.docstrings)

    def code_lines(self) -> int:
        """Lines that hold code: no docstring, comment or blank line."""
        lines = {n for t in self.tokens for n in range(t.start[0], t.end[0] + 1)}
        for _, text in self.docstrings:
            lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        return len(lines)

    def functions(self) -> list[tuple[str, _Function]]:
        """Functions and methods with their names, those within functions included."""
        return list(_functions(self.tree, ""))

    def place(self, name: str, node: _Function, note: str) -> str:
        """A line for a list of places."""
        return f"{self.path}:{node.lineno} {name} ({note})"

    def imports(self, known: dict[str, Module], *, at_import: bool) -> set[str]:
        """Modules of `known` that this one imports, outside TYPE_CHECKING.

        Args:
            known: Modules by name.
            at_import: Leaves out imports within functions.
        """
        found: set[str] = set()

        def visit(node: ast.AST) -> None:
            if isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                found.update(name if name in known else node.module or "" for name in full)
            elif isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            for child in _inner(node):
                is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                if not is_typing and not (at_import and isinstance(child, _Function)):
                    visit(child)

        visit(self.tree)
        return (found & known.keys()) - {self.name}


def _inner(node: ast.AST) -> Iterator[ast.AST]:
    """What a node is made of but expressions, which hold neither imports nor functions."""
    return (n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Function]]:
    for child in _inner(node):
        if isinstance(child, _Function):
            yield prefix + child.name, child
        if isinstance(child, _Function | ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def read_modules(root: Path) -> dict[str, Module]:
    """The Python files of the packages at `root`, by their import names."""
    modules = {}
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        shown = str(path.relative_to(root))
        name = shown.split("/src/")[1].removesuffix(".py").replace("/", ".")
        name = name.removesuffix(".__init__")
        modules[name] = Module(name, shown, path.read_text(encoding="utf-8"))
    return modules


def complexity(function: _Function) -> int:
    """Number of ways through a function, as this file's head defines it."""
    count, left = 1, list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, _Function):
            continue
        count += isinstance(node, _BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        left += ast.iter_child_nodes(node)
    return count


def _token_measures(modules: dict[str, Module], root: Path) -> dict[str, Measured]:
    tokens = {"core": 0, "tools": 0}
    for module in modules.values():
        part = "tools" if f"{module.name}.".startswith("lightrft.tools.") else "core"
        tokens[part] += module.num_tokens
    tests = [
        Module(path.stem, str(path), path.read_text(encoding="utf-8"))
        for path in root.glob("tests/**/*.py")
    ]

    def signs(*endings: str) -> int:
        files = [
            path
            for path in root.glob("packages/**/*")
            if path.suffix in endings and "build" not in path.parts
        ]
        texts = [path.read_text(encoding="utf-8") for path in files if ".venv" not in path.parts]
        if ".cpp" in endings:
            texts = [_NATIVE_COMMENT.sub("", text) for text in texts]
        return sum(len(_SIGNS.findall(text)) for text in texts)

    above = [
        f"{name}: {size:,d}, accepted {limit:,d}"
        for name, size in folder_tokens(modules).items()
        if (limit := folder_limit(_read_table(root), name, size)) < size
    ]
    return {
        "folders_above": Measured(len(above), above),
        "core_tokens": Measured(tokens["core"]),
        "tools_tokens": Measured(tokens["tools"]),
        "all_tokens": Measured(sum(tokens.values())),
        "tests_tokens": Measured(sum(test.num_tokens for test in tests)),
        "native_tokens": Measured(signs(".cpp", ".hpp", ".cu", ".cuh")),
        "page_tokens": Measured(signs(".js", ".jinja")),
    }


def folder_tokens(modules: dict[str, Module]) -> dict[str, int]:
    """Return the tokens of each folder of `lightrft`, and of each folder of its tools."""
    sizes: dict[str, int] = {}
    for module in modules.values():
        parts = module.path.split("/lightrft/")[1].split("/")[:-1]
        depth = 2 if parts[:1] == ["tools"] else 1
        if parts:
            name = "/".join(parts[:depth])
            sizes[name] = sizes.get(name, 0) + module.num_tokens
    return sizes


def _function_measures(modules: dict[str, Module]) -> dict[str, Measured]:
    places: dict[str, list[str]] = {
        "long_functions": [],
        "wide_functions": [],
        "complex_functions": [],
        "whole_records": [],
        "strategy_parameters": [],
    }
    for module in modules.values():
        for name, node in module.functions():
            arguments = node.args
            is_kernel = any(
                ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list
            )
            first = node.body[0].lineno if is_kernel else node.lineno
            lines = (node.end_lineno or first) - first + 1
            parameters = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
            width = len(parameters)
            types = [ast.unparse(each.annotation) for each in parameters if each.annotation]
            ways = complexity(node)
            is_free = is_kernel or f"{module.name}:{name}" in PUBLISHED
            if lines > MAX_LINES:
                places["long_functions"].append(module.place(name, node, f"{lines} lines"))
            if width > MAX_PARAMETERS and not is_free:
                places["wide_functions"].append(module.place(name, node, f"{width} parameters"))
            if {"TrainConfig", "StrategyConfig"} & set(types):
                places["whole_records"].append(module.place(name, node, "all options"))
            for _ in range(types.count("StrategyBase")):
                places["strategy_parameters"].append(module.place(name, node, "a strategy"))
            if ways > MAX_COMPLEXITY:
                places["complex_functions"].append(module.place(name, node, f"complexity {ways}"))
    return {name: Measured(len(found), found) for name, found in places.items()}


def _module_measures(modules: dict[str, Module]) -> dict[str, Measured]:
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for module in modules.values():
        for name in module.imports(modules, at_import=False):
            importers[name].add(module.name)
    small = [
        f"{module.path} ({module.code_lines()} lines, only for {min(importers[name])})"
        for name, module in modules.items()
        if len(importers[name]) == 1
        and not module.path.endswith("__init__.py")
        and module.code_lines() < SMALL
    ]
    closures = {
        name: Measured(len(closure(modules, [door for door in doors if door in modules])))
        for name, doors in DOORS.items()
    }
    return {"small_modules": Measured(len(small), small), **closures}


def closure(modules: dict[str, Module], doors: list[str]) -> set[str]:
    """Return the modules that some import when they are imported, directly or not, and these."""
    found: set[str] = set()
    while doors:
        name = doors.pop()
        if name not in found:
            found.add(name)
            doors += modules[name].imports(modules, at_import=True)
    return found


def _text_measures(modules: dict[str, Module]) -> dict[str, Measured]:
    skips, questions, num_docstrings = [], [], 0
    for module in modules.values():
        for number, line in enumerate(module.source.splitlines(), 1):
            if re.search(r"#\s*fmt:\s*skip", line):
                skips.append(f"{module.path}:{number}")
        for node, text in module.docstrings:
            if isinstance(node, ast.Module | ast.ClassDef):
                num_docstrings += 1
                if _QUESTION.match(ast.get_docstring(node) or ""):
                    questions.append(f"{module.path}:{text.lineno}")
    share = round(1000 * len(questions) / max(1, num_docstrings))
    return {
        "format_skips": Measured(len(skips), skips),
        "question_docstrings": Measured(share, questions),
    }


def _name(node: ast.AST) -> str:
    """Return the last word of a name, of an attribute, or of what is called or indexed."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _name(inner)
    return ""


def _constructions(tree: ast.AST) -> Iterator[str]:
    """Yield names that are called or handed over."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield _name(node.func)
            is_asked = _name(node.func) in ("isinstance", "issubclass", "fields")
            for each in () if is_asked else node.args:
                if isinstance(each, ast.Name | ast.Attribute | ast.Subscript):
                    yield from map(_name, ast.walk(each))


def _is_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a dataclass or named tuple that holds values and does nothing."""
    kinds = {_name(each) for each in (*node.decorator_list, *node.bases)}
    methods = [each for each in node.body if isinstance(each, _Function)]
    return bool(kinds & {"dataclass", "NamedTuple"}) and all(
        [_name(each) for each in method.decorator_list] == ["property"] for method in methods
    )


def _class_measures(modules: dict[str, Module]) -> dict[str, Measured]:
    files: dict[str, set[str]] = {}
    records: dict[str, str] = {}
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name.lstrip("_"), set()).add(module.path)
                if _is_record(node):
                    records[node.name] = f"{module.path}:{node.lineno} {node.name}"
    uses = Counter(name for each in modules.values() for name in _constructions(each.tree))
    repeated = [f"{name}: {', '.join(sorted(p))}" for name, p in files.items() if len(p) > 1]
    single = [place for name, place in records.items() if uses[name] == 1]
    return {
        "repeated_class_names": Measured(len(repeated), repeated),
        "single_use_records": Measured(len(single), single),
    }


def measure(root: Path) -> dict[str, Measured]:
    """All measures of the tree at `root` for which nothing runs, by name."""
    modules = read_modules(root)
    return {
        **_token_measures(modules, root),
        **_function_measures(modules),
        **_module_measures(modules),
        **_text_measures(modules),
        **_class_measures(modules),
    }


# The process that trains: it notes each file of a called function, and the number of lines of
# metrics.jsonl at that time.
_RUNNER = """
import json, os, sys, threading
folder, out, *arguments = sys.argv[1:]
metrics = os.path.join(folder, "metrics.jsonl")
files, steps = {}, {}

def look(frame, event, argument):
    if event == "call":
        file = frame.f_code.co_filename
        if file not in files:
            files[file] = "/packages/" in file and "/src/lightrft/" in file
        if files[file]:
            try:
                size = os.stat(metrics).st_size
            except OSError:
                size = 0
            steps.setdefault(size, set()).add(file)

threading.setprofile(look)
sys.setprofile(look)
from lightrft.cli.main import main
code = main([*arguments, "--output_dir", folder])
sys.setprofile(None)
threading.setprofile(None)
with open(out, "w") as file:
    json.dump([sorted(names) for _, names in sorted(steps.items())], file)
sys.exit(code)
"""
_REWARD = """
def digits(prompts, responses, labels, **columns):
    return [sum(c.isdigit() for c in r) / max(1, len(r)) for r in responses]
"""
_COMMANDS = {
    "": """
train --input_key prompt --reward_fn reward.py:digits --engine_type hf
--advantage_estimator group_norm
--n_samples_per_prompt 4 --rollout_batch_size 4 --prompt_max_len 64 --generate_max_len 8
""",
    "sft_": "sft",
}
_OPTIONS = """
--fsdp --pretrain tiny --prompt_data prompts.jsonl --train_batch_size 16
--micro_train_batch_size 4 --max_steps 3
"""


def measure_run(root: Path) -> dict[str, Measured]:
    """Files that small runs of the tree at `root` execute; takes about 30 seconds of a core.

    Raises:
        subprocess.CalledProcessError: A run failed.
    """
    python = root / ".venv/bin/python"
    program = str(python) if python.exists() else sys.executable
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:

        def run(*arguments: str) -> None:
            command = [program, *arguments]
            subprocess.run(command, cwd=folder, env=environment, check=True, stdout=sys.stderr)

        prompts = [
            json.dumps({"prompt": f"What is {i} plus {i}?", "completion": f"It is {i + i}."})
            for i in range(48)
        ]
        Path(folder, "prompts.jsonl").write_text("\n".join(prompts) + "\n", encoding="utf-8")
        Path(folder, "reward.py").write_text(_REWARD, encoding="utf-8")
        run("-m", "lightrft.cli.main", "init-model", "tiny", "--preset", "tiny-qwen3")
        for name, command in _COMMANDS.items():
            listed = Path(folder, f"{name}files.json")
            words = [*command.split(), *_OPTIONS.split()]
            run("-c", _RUNNER, f"{folder}/{name}run", str(listed), *words)
            parts = json.loads(listed.read_text(encoding="utf-8"))
            names = [{f"packages/{file.split('/packages/')[1]}" for file in part} for part in parts]
            if len(names) != 4:
                raise ValueError(f"metrics.jsonl grew {len(names) - 1} times, expected 3")
            whole = sorted(set().union(*names))
            found[f"{name}step_files"] = Measured(len(names[1]), sorted(names[1]))
            found[f"{name}command_files"] = Measured(len(whole), whole)
    return found


def _read_table(root: Path) -> dict[str, Any]:
    path = root / ACCEPTED
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def folder_limit(table: dict[str, Any], folder: str, size: int) -> int:
    """Return the accepted tokens of a folder, those of later capabilities included.

    Without a table of folders that is its size.
    """
    if "folders" not in table:
        return size
    later = (costs.get("folders", {}).get(folder, 0) for costs in table.get("added", {}).values())
    return int(table["folders"].get(folder, 0)) + sum(later)


def read_accepted(root: Path) -> dict[str, int]:
    """Return the accepted maximum of each measure of the tree at `root`; empty if it names none.

    A table `[added."CAPABILITY"]` adds its numbers to the others and says its `reason`; `folders`
    in it adds to those of folders.

    Raises:
        ValueError: A capability has no reason, or adds to a measure that is not accepted.
    """
    accepted = _read_table(root)
    accepted.pop("folders", None)
    path = root / ACCEPTED
    for name, costs in accepted.pop("added", {}).items():
        costs.pop("folders", None)
        if not str(costs.pop("reason", "")).strip():
            raise ValueError(f"{path}: added.{name!r} has no reason: say what the code is for")
        for measure, tokens in costs.items():
            if measure not in accepted:
                raise ValueError(f"{path}: added.{name!r} names {measure!r}, which is no measure")
            accepted[measure] += tokens
            if measure in ("core_tokens", "tools_tokens") and "all_tokens" in accepted:
                accepted["all_tokens"] += tokens
    return accepted


def excesses(measured: dict[str, Measured], accepted: dict[str, int]) -> list[str]:
    """Measures above what is accepted, each with the places that it counts."""
    return [
        "\n  ".join([f"{name}: {found.value}, accepted {accepted[name]}", *found.places])
        for name, found in measured.items()
        if found.value > accepted[name]
    ]


def main() -> None:
    """Prints the measures of the tree at ROOT beside the accepted values."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--run", action="store_true", help="measure a run, too")
    parser.add_argument("--list", action="store_true", help="name what is counted")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    accepted = read_accepted(root)
    measured = measure(root) | (measure_run(root) if arguments.run else {})
    for name, found in measured.items():
        limit = f"accepted {accepted[name]:8,d}  " if name in accepted else ""
        print(f"{found.value:8,d}  {limit}{name}")
        for place in found.places if arguments.list else []:
            print(f"          {place}")


if __name__ == "__main__":
    main()

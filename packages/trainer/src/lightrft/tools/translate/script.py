"""A training script of TRL, read without running it: arguments, rewards and data."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightrft.cli.errors import UsageError
from lightrft.config.files import regular_file

# TRL's trainers by the first part of their names, with the command that does the same.
COMMANDS = {
    "GRPO": "train",
    "SFT": "sft",
    "DPO": "prefer",
    "KTO": "prefer",
    "Reward": "reward",
}
_GENERAL_CONFIG = "TrainingArguments"
# `load_dataset` takes these names for files of this ending.
_FORMATS = ("json", "parquet", "csv")
# Options of a data set's source and split, by the trainer's argument.
DATA_SETS = {
    "train_dataset": ("prompt_data", "prompt_split"),
    "eval_dataset": ("eval_data", "eval_split"),
}
# Methods of a data set that only reorder or reformat its rows.
_SAME_ROWS = ("shuffle", "flatten_indices", "with_format", "set_format")


@dataclass(slots=True)
class Script:
    """The contents of a script.

    Args:
        command: Command of lightrft that does the same.
        loss: Trainer whose loss the configuration leaves out: sft, dpo, kto ...
        arguments: Literal values of the configuration, the trainer and the adapters by name, and
            options that name a data set, by our names.
        unread: Source of the other values.
        notes: Sentences for a person to check.
        rewards: Names of reward functions that the script defines, in order.
        reward_source: Source of these functions and what they need, for a separate file.
    """

    command: str
    loss: str
    arguments: dict[str, object] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rewards: tuple[str, ...] = ()
    reward_source: str = ""


def read_script(path: Path) -> Script:
    """Read the training script at a path.

    Raises:
        UsageError: The file is no Python, or calls no known trainer or configuration, or several.
    """
    try:
        tree = ast.parse(regular_file(path).read_text("utf-8"))
    except (OSError, SyntaxError, ValueError) as err:
        raise UsageError(f"{path}: expected a Python script: {err}") from err
    kind, calls = _calls(tree, path)
    script = Script(COMMANDS[kind], kind.lower())
    names = _Names(tree)
    expressions: dict[str, ast.expr] = {}
    for call in calls:
        if call.args and _last_name(call.func) == f"{kind}Trainer":
            expressions["model"] = call.args[0]
        expressions |= {each.arg: each.value for each in call.keywords if each.arg}
        if any(each.arg is None for each in call.keywords):
            script.notes.append(f"{ast.unparse(call)[:80]}: what ** brings cannot be read")
    expressions.pop("args", None)
    rewards = [
        names.value_of(each) for each in _listed(expressions.pop("reward_funcs", None), names)
    ]
    functions = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    for each in rewards:
        _read_reward(each, functions, script)
    script.reward_source = "\n".join(map(ast.unparse, _needed(tree, script.rewards))) + "\n"
    for name, value in expressions.items():
        _read_argument(name, names.value_of(value), script, names)
    return script


def _calls(tree: ast.Module, path: Path) -> tuple[str, list[ast.Call]]:
    """Return the kind of trainer, and the calls that configure it, in order."""
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    wanted = {f"{kind}{end}": kind for kind in COMMANDS for end in ("Config", "Trainer")}
    named = [(wanted[name], each) for each in calls if (name := _last_name(each.func)) in wanted]
    kinds = sorted({kind for kind, _ in named})
    if not any(call.keywords for _, call in named):
        trainers = ", ".join(f"{kind}Trainer" for kind in COMMANDS)
        raise UsageError(f"{path}: expected a call of {trainers} or of its Config: found none")
    if len(kinds) > 1:
        trainers = " and ".join(f"{kind}Trainer" for kind in kinds)
        raise UsageError(f"{path}: expected one trainer, found {trainers}: give each a script")
    general = [each for each in calls if _last_name(each.func) == _GENERAL_CONFIG]
    return kinds[0], [*general, *(call for _, call in named)]


class _Names:
    """Values of a script's names, if each is assigned before it is used."""

    def __init__(self, tree: ast.Module) -> None:
        self._assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(node, ast.Assign):
                    self._assigned.setdefault(target.id, []).append(node.value)

    def value_of(self, node: ast.expr) -> ast.expr:
        """Return the last value that a name got above the place where it is used."""
        while isinstance(node, ast.Name):
            above = [e for e in self._assigned.get(node.id, []) if e.lineno < node.lineno]
            if not above:
                break
            node = max(above, key=lambda each: each.lineno)
        return node

    def literal(self, node: ast.expr) -> object:
        """Return the value of an expression of literals and of names of literals.

        Raises:
            ValueError: The expression is something else.
        """
        outer = self

        class Filled(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                value = outer.value_of(node)
                return node if isinstance(value, ast.Name) else self.visit(value)

        try:
            return ast.literal_eval(Filled().visit(copy.deepcopy(node)))
        except (ValueError, TypeError, RecursionError) as err:
            raise ValueError(f"no literal: {ast.unparse(node)}") from err


def _read_reward(reward: ast.expr, functions: set[str], script: Script) -> None:
    """Note a function of the script, a reward model, or an expression that is neither."""
    if isinstance(reward, ast.Constant):
        script.arguments["reward_pretrain"] = (reward.value,)
    elif isinstance(reward, ast.Name) and reward.id in functions:
        script.rewards += (reward.id,)
    else:
        script.unread["reward_funcs"] = ast.unparse(reward)


def _read_argument(name: str, value: ast.expr, script: Script, names: _Names) -> None:
    """Note an argument of the configuration or the trainer."""
    call = _last_name(value.func) if isinstance(value, ast.Call) else ""
    try:
        script.arguments[name] = names.literal(value)
    except ValueError:
        if name in DATA_SETS:
            _read_data_set(name, value, script, names)
        elif name == "callbacks":
            script.notes.append(
                f"callbacks = {ast.unparse(value)}: write them as lightrft.trainer.Callback with "
                "end_step(step, metrics), and call lightrft.trainer from Python with them"
            )
        elif call == "LoraConfig" and isinstance(value, ast.Call):
            _read_adapters(value, script, names)
        elif call == "from_pretrained" and isinstance(value, ast.Call):
            _read_pretrained(name, value, script, names)
        else:
            script.unread[name] = ast.unparse(value)


def _read_adapters(call: ast.Call, script: Script, names: _Names) -> None:
    """Note the arguments of a LoraConfig, with PEFT's values for missing ones."""
    script.arguments |= {"r": 8, "lora_alpha": 8}
    for each in call.keywords:
        try:
            script.arguments[str(each.arg)] = names.literal(each.value)
        except ValueError:
            if each.arg != "task_type":
                script.unread[str(each.arg)] = ast.unparse(each.value)
    if script.arguments.get("target_modules") is None:
        script.notes.append(
            "target_modules: PEFT chooses layers by the model, mostly q_proj and v_proj: all "
            "linear layers get adapters here unless target_modules is set"
        )


def _read_pretrained(name: str, call: ast.Call, script: Script, names: _Names) -> None:
    """Note a model or tokenizer that is read from a folder or the hub."""
    try:
        place = names.literal(call.args[0])
    except (ValueError, IndexError):
        place = None
    if name == "model" and place is not None:
        script.arguments["model"] = place
        script.notes += [
            f"{each.arg} = {ast.unparse(each.value)}: the model is read without it"
            for each in call.keywords
        ]
    elif name == "model" or place not in (None, script.arguments.get("model")):
        script.unread[name] = ast.unparse(call)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _listed(node: ast.expr | None, names: _Names) -> Sequence[ast.expr]:
    if node is None:
        return []
    named = names.value_of(node)
    return named.elts if isinstance(named, ast.List | ast.Tuple) else [node]


def _read_data_set(name: str, value: ast.expr, script: Script, names: _Names) -> None:
    """Note the options of a data set."""
    option, split = DATA_SETS[name]
    changes: list[str] = []
    node, part = value, None
    while True:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            part, node = str(node.slice.value), names.value_of(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            inner = names.value_of(node.func.value)
            if not isinstance(inner, ast.Call | ast.Subscript):
                break
            if node.func.attr not in _SAME_ROWS:
                changes.append(f".{node.func.attr}({', '.join(map(ast.unparse, node.args))})")
            node = inner
        else:
            break
    try:
        source, chosen = _source(node, part, names)
    except (ValueError, LookupError, TypeError, AttributeError):
        script.unread[name] = ast.unparse(value)
        return
    script.arguments |= {option: source} | ({split: chosen} if chosen else {})
    script.notes += [
        f"{name}: {change} is not carried out: give rows that are changed by it already "
        "(Dataset.to_json writes them)"
        for change in reversed(changes)
    ]


def _source(node: ast.expr, part: str | None, names: _Names) -> tuple[str, str]:
    """Return the name of a data set that is loaded, and its part, "" of files.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: The call is another one.
    """
    if not isinstance(node, ast.Call) or _last_name(node.func) != "load_dataset":
        raise ValueError("no data set")
    first = names.literal(node.args[0])
    named = {each.arg: names.literal(each.value) for each in node.keywords if each.arg}
    if first in _FORMATS:
        return _files(named, part), ""
    others = [*map(names.literal, node.args[1:]), *filter(None, [named.get("name")])]
    source = ":".join(map(str, [first, *others]))
    return source, str(named.get("split") or part or "train")


def _files(named: Mapping[str, object], part: str | None) -> str:
    """Return the files of a data set of files, from its arguments and part.

    Raises:
        ValueError, KeyError: The files are not written down, or only a part of them is meant.
    """
    chosen = named.get("split") or part
    files = named.get("data_files")
    if isinstance(files, dict):
        files = files[str(chosen)] if chosen else None
    elif chosen not in (None, "train"):
        raise ValueError("a part of files")
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list | tuple):
        raise ValueError("no files")
    return ",".join(map(str, files))


def _needed(tree: ast.Module, names: Sequence[str]) -> list[ast.stmt]:
    """Return the statements of a module that define some names and all that these use."""
    wanted, kept = set(names), set[int]()
    while True:
        more = [
            place
            for place, node in enumerate(tree.body)
            if place not in kept and wanted & {*_defined(node)}
        ]
        if not more:
            return [tree.body[place] for place in sorted(kept)]
        kept.update(more)
        nodes = (each for place in more for each in ast.walk(tree.body[place]))
        wanted |= {each.id for each in nodes if isinstance(each, ast.Name)}


def _defined(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for each in ast.walk(node):
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield from (name.asname or name.name.partition(".")[0] for name in each.names)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id

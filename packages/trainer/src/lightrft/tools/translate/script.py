"""A training script of TRL, read without running it: arguments, rewards and rows."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightrft.cli.errors import UsageError

CONFIG, TRAINER = "GRPOConfig", "GRPOTrainer"
# Modules of which a reward function needs nothing.
_OF_TRAINING = ("trl", "datasets", "accelerate")
# Data sets of these names are files, whose endings say the same.
_FORMATS = ("json", "parquet", "csv", "text", "arrow")


@dataclass(frozen=True, slots=True)
class Script:
    """The contents of a script.

    Args:
        arguments: Of the configuration and the trainer, by name; those whose value is written down.
        unread: Source of the others.
        rewards: Names of reward functions that the script defines, in order.
        reward_source: Its imports, constants and functions, for a file of their own.
        rows: Of a data set that is written down in the script.
    """

    arguments: dict[str, object]
    unread: dict[str, str]
    rewards: tuple[str, ...]
    reward_source: str
    rows: tuple[dict[str, object], ...] = field(default=())


def read_script(path: Path) -> Script:
    """The script at a path.

    Raises:
        UsageError: It is no Python, or calls no trainer or configuration that is known.
    """
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError) as err:
        raise UsageError(f"{path}: expected a Python script: {err}") from err
    given: dict[str, ast.expr] = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and _last_name(call.func) in (CONFIG, TRAINER):
            given |= {each.arg: each.value for each in call.keywords if each.arg}
    if not given:
        raise UsageError(f"{path}: expected a call of {TRAINER} or {CONFIG}: found none")
    given.pop("args", None)
    script = Script({}, {}, _own_rewards(tree, given), _reward_source(tree))
    _read_rewards(_listed(given.pop("reward_funcs", None)), script)
    names = _assigned(tree)
    rows: tuple[dict[str, object], ...] = ()
    for name, value in given.items():
        value = names.get(value.id, value) if isinstance(value, ast.Name) else value
        rows = _read_argument(name, value, script) or rows
    return replace(script, rows=rows)


def _own_rewards(tree: ast.Module, given: Mapping[str, ast.expr]) -> tuple[str, ...]:
    """Reward functions that the script defines."""
    functions = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    rewards = _listed(given.get("reward_funcs"))
    return tuple(e.id for e in rewards if isinstance(e, ast.Name) and e.id in functions)


def _read_rewards(rewards: Sequence[ast.expr], script: Script) -> None:
    """Notes reward models, and the source of what is neither that nor a function of the script."""
    for each in rewards:
        if isinstance(each, ast.Constant):
            script.arguments["reward_pretrain"] = each.value
        elif not (isinstance(each, ast.Name) and each.id in script.rewards):
            script.unread["reward_funcs"] = ast.unparse(each)


def _read_argument(name: str, value: ast.expr, script: Script) -> tuple[dict[str, object], ...]:
    """Notes an argument; the rows of a data set that is written down are the result."""
    try:
        script.arguments[name] = ast.literal_eval(value)
    except ValueError:
        found = _data_set(value)
        if isinstance(found, tuple):
            return found
        if found is None:
            script.unread[name] = ast.unparse(value)
        else:
            script.arguments.update(found)
    return ()


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """The last value of each name of the module."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _listed(node: ast.expr | None) -> list[ast.expr]:
    if node is None:
        return []
    return list(node.elts) if isinstance(node, ast.List | ast.Tuple) else [node]


def _data_set(
    node: ast.expr,
) -> Mapping[str, object] | tuple[dict[str, object], ...] | None:
    """Options that name a data set, or the rows of one that is written down; None is neither."""
    if not isinstance(node, ast.Call):
        return None
    try:
        first = ast.literal_eval(node.args[0])
        named = {each.arg: ast.literal_eval(each.value) for each in node.keywords if each.arg}
    except (ValueError, IndexError):
        return None
    if _last_name(node.func) == "from_list" and isinstance(first, list):
        return tuple(first)
    if _last_name(node.func) != "load_dataset" or not isinstance(first, str):
        return None
    if first in _FORMATS:
        files = named.get("data_files")
        files = [files] if isinstance(files, str) else files
        if not isinstance(files, list | tuple) or named.get("split", "train") != "train":
            return None
        return {"prompt_data": ",".join(map(str, files))}
    if len(node.args) > 1:
        first = f"{first}:{ast.literal_eval(node.args[1])}"
    return {"prompt_data": first, "prompt_split": named.get("split", "train")}


def _reward_source(tree: ast.Module) -> str:
    return "\n".join(ast.unparse(node) for node in _kept(tree)) + "\n"


def _kept(tree: ast.Module) -> Iterator[ast.stmt]:
    """Imports but those of training, constants and functions."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] not in _OF_TRAINING:
                yield node
        elif isinstance(node, ast.Import):
            if not any(each.name.partition(".")[0] in _OF_TRAINING for each in node.names):
                yield node
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node
        elif isinstance(node, ast.Assign):
            try:
                ast.literal_eval(node.value)
            except ValueError:
                continue
            yield node

"""Adapters for reward functions with the signatures of TRL, verl and OpenRLHF."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Protocol, cast, runtime_checkable

Function = Callable[..., object]
# Their parameters, and our arguments for them.
_OURS = {
    "solution_str": "responses",
    "solution_strs": "responses",
    "ground_truth": "labels",
    "ground_truths": "labels",
    "data_sources": "data_source",
    "extra_infos": "extra_info",
}
# Columns of verl's data, which may be absent here.
_OPTIONAL = ("data_source", "extra_info")
# Parameters without a counterpart here, and what to do instead.
WITHOUT_COUNTERPART = {
    "environments": "it is given what an environment kept: train with --environment",
    "completion_ids": "give the function a parameter responses, which are texts",
    "completions_ids": "give the function a parameter responses, which are texts",
    "response_ids": "give the function a parameter responses, which are texts",
    "log_metric": "return a dict of numbers for each response; their means are metrics",
    "log_extra": "return a dict of numbers for each response; samples.jsonl has them",
    "trainer_state": "a function is called with data alone; leave it out",
    "reward_router_address": "call a model by the reward judge, or reward_pretrain",
    "reward_model_tokenizer": "call a model by the reward judge, or reward_pretrain",
}


@runtime_checkable
class _ToList(Protocol):
    def tolist(self) -> object: ...


def adapted(function: Function) -> Function:
    """Return a function with our parameters, if the names are those of another project.

    `solution_str` is verl's, called for each response; `solution_strs` is its batched form.
    `queries` is OpenRLHF's: prompt and response in one text, a dict as result. `ground_truth` is
    the label where the data has no such column. Other functions are returned unchanged.
    """
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    if "solution_str" in names:
        return _as_ours(function, _for_each)
    if "solution_strs" in names:
        return _as_ours(function, _with_their_names)
    if "queries" in names:
        return _as_ours(function, _with_queries, adds=("prompts", "responses"), drops=("queries",))
    if "ground_truth" in names:
        return _as_ours(function, _with_ground_truth, adds=("labels",), keeps=("ground_truth",))
    return function


def _as_ours(
    function: Function,
    call: Callable[..., object],
    *,
    adds: Sequence[str] = (),
    drops: Sequence[str] = (),
    keeps: Sequence[str] = (),
) -> Function:
    """Return the function behind `call`, with a signature that names its inputs.

    Args:
        function: Function of the other project.
        call: Callable that takes the function and our keyword arguments.
        adds, drops: Parameters that `call` needs, and parameters that it makes.
        keeps: Parameters that are columns of the same name, if the data has them.
    """
    kept = list[inspect.Parameter]()
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.VAR_KEYWORD:
            kept.append(each)
        elif each.name not in drops:
            name = each.name if each.name in keeps else _OURS.get(each.name, each.name)
            default = None if name in (*_OPTIONAL, *keeps) else each.default
            kept.append(each.replace(name=name, kind=each.KEYWORD_ONLY, default=default))
    names = {each.name for each in kept}
    more = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in adds if n not in names]
    signature = inspect.Signature(sorted([*more, *kept], key=lambda each: each.kind))

    @functools.wraps(function)
    def given(**arguments: object) -> object:
        return call(function, arguments)

    vars(given)["__signature__"] = signature
    return given


def _theirs(function: Function, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments under their names; the rest of ours goes to `**keywords`."""
    names = inspect.signature(function).parameters
    values = {
        name: arguments.get(_OURS.get(name, name))
        for name, each in names.items()
        if each.kind is not each.VAR_KEYWORD
        and (_OURS.get(name, name) in arguments or name in _OURS or name in _OPTIONAL)
    }
    if any(each.kind is each.VAR_KEYWORD for each in names.values()):
        used = {*values, *(_OURS.get(name, name) for name in values)}
        values |= {name: value for name, value in arguments.items() if name not in used}
    return values


def _for_each(function: Function, arguments: Mapping[str, object]) -> list[object]:
    values = _theirs(function, arguments)
    count = len(cast("Sequence[object]", arguments["responses"]))
    rows = [
        {
            name: value[row] if isinstance(value, list) and len(value) == count else value
            for name, value in values.items()
        }
        for row in range(count)
    ]
    return [_later(function(**row), _score) for row in rows]


def _with_their_names(function: Function, arguments: Mapping[str, object]) -> object:
    count = len(cast("Sequence[object]", arguments["responses"]))
    values = _theirs(function, arguments)
    for name in ("data_sources", "extra_infos"):
        if name in values and values[name] is None:
            values[name] = [None] * count
    return _later(function(**values), lambda found: [_score(each) for each in _listed(found)])


def _with_queries(function: Function, arguments: Mapping[str, object]) -> object:
    texts = [cast("list[str]", arguments[name]) for name in ("prompts", "responses")]
    queries = [prompt + response for prompt, response in zip(*texts, strict=True)]
    names = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in names.values())
    values = {name: value for name, value in arguments.items() if name in names or takes_all}
    return _later(function(**values, queries=queries), _logged)


def _with_ground_truth(function: Function, arguments: Mapping[str, object]) -> object:
    values = dict(arguments)
    if values.get("ground_truth") is None:
        values["ground_truth"] = values["labels"]
    names = inspect.signature(function).parameters
    if "labels" not in names and all(each.kind is not each.VAR_KEYWORD for each in names.values()):
        del values["labels"]
    return function(**values)


def _later(returned: object, change: Callable[[object], object]) -> object:
    """Return the change of a value, or an awaitable of it if the value is awaitable."""
    if not inspect.isawaitable(returned):
        return change(returned)

    async def changed() -> object:
        return change(await cast("Awaitable[object]", returned))

    return changed()


def _listed(value: object) -> Sequence[object]:
    return cast("Sequence[object]", value.tolist() if isinstance(value, _ToList) else value)


def _score(item: object) -> object:
    """Return a score of verl in our form: the other numbers of a dict are components."""
    if not isinstance(item, Mapping) or "score" not in item:
        return item
    others = {name: value for name, value in item.items() if isinstance(value, Real)}
    return {"reward": item["score"], **{n: v for n, v in others.items() if n != "score"}}


def _logged(returned: object) -> object:
    """Return the dict of OpenRLHF as a list: its rewards, and what it logs as components."""
    if not isinstance(returned, Mapping) or "rewards" not in returned:
        return returned
    rewards = _listed(returned["rewards"])
    logs = cast("Mapping[str, object]", returned.get("extra_logs") or {})
    columns = {name: _listed(values) for name, values in logs.items()}
    return [
        {"reward": reward, **{name: values[row] for name, values in columns.items()}}
        for row, reward in enumerate(rewards)
    ]

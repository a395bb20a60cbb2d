"""Code of users in a worker: how it is loaded, and the rewards that it returns."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from lightrft.config import ConfigError
from lightrft.config.options import comma_hint
from lightrft.config.registry import (
    ENVIRONMENT_KINDS,
    Registry,
    load_reference,
    split_kind,
    split_reference,
)
from lightrft.rewards.user_task import finite_number
from lightrft.rewards.worker import ReportedError


def total_and_parts(reward: object, *, whole: str, part: str) -> list[object]:
    """Return the reward of an episode as its total and its parts.

    Args:
        reward: A number, or a dict of numbers whose `reward` is the total, by default their sum.
        whole: Name of the reward in errors.
        part: Format of the name of a part in errors.

    Raises:
        ReportedError: It is anything else, or a number is not finite.
    """
    if not isinstance(reward, Mapping):
        return [finite_number(whole, reward), {}]
    parts = {str(name): finite_number(part.format(name), value) for name, value in reward.items()}
    total = parts.pop("reward", None)
    if total is None:
        total = finite_number(f"the sum of {whole}", sum(parts.values()))
    return [total, parts]


def load_user_code(reference: str, kind: str) -> object:
    """Return what an import string names; modules beside its file can be imported, as in a script.

    Args:
        reference: FILE.py:NAME or package.module:NAME.
        kind: Kind of the object in errors.

    Raises:
        ReportedError: It cannot be loaded.
    """
    place = (split_reference(reference) or ("", ""))[0]
    if place.endswith(".py"):
        sys.path.insert(0, str(Path(place).resolve().parent))
    try:
        return load_reference(reference, kind=kind)
    except ConfigError as error:
        raise ReportedError(str(error)) from error


def absolute_reference(
    reference: str, kind: str, kinds: Registry = ENVIRONMENT_KINDS
) -> tuple[str, str]:
    """Return an import string that is valid in a worker, and its file or module.

    Args:
        reference: FILE.py:NAME or package.module:NAME, or KIND:WHAT; an address stays as it is.
        kind: Kind of the object in errors.
        kinds: Known kinds.

    Raises:
        ConfigError: It is none of these.
    """
    adapter, rest = split_kind(reference, kinds)
    place, name = split_reference(rest) or ("", rest)
    if not place and adapter is None:
        others = ", ".join(f"{each}:..." for each in kinds)
        raise ConfigError(
            f"{kind} {reference}: expected FILE.py:NAME, package.module:NAME or {others}"
            f"{comma_hint(reference)}"
        )
    if not place.endswith(".py"):
        return reference, place
    place = str(Path(place).resolve())
    return f"{'' if adapter is None else f'{adapter}:'}{place}:{name}", place

"""The options of a training strategy: the part of the record that `get_strategy` needs."""

from __future__ import annotations

import copy
import importlib.util
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from lightrft.config.options import (
    ConfigError,
    OptionInfo,
    Rule,
    accepts,
    check_value,
    coerce,
    did_you_mean,
    holding,
    looks_secret,
    options_of,
    rules_of,
    shown,
    type_hints,
)
from lightrft.config.other_names import said_once, without_switches
from lightrft.config.parts.machine import BackendOptions, MachineOptions
from lightrft.config.parts.rollout import ShapingOptions
from lightrft.config.parts.run_control import LogOptions
from lightrft.config.parts.scores import ServiceOptions

# Weights whose whole copy every rank would load into the host's memory.
META_INIT_BYTES = 2_000_000_000
_NO_DEFAULT = object()


class _UnreadableError(Exception):
    pass


class _Readable:
    """A configuration where reading a wrong or missing field raises."""

    def __init__(self, config: object, wrong: Collection[str]) -> None:
        self._config, self._wrong = config, wrong

    def __getattr__(self, name: str) -> object:
        if name in self._wrong:
            raise _UnreadableError
        try:
            member = getattr(type(self._config), name)
        except AttributeError:
            raise _UnreadableError from None
        # A property may read wrong fields as well.
        return member.__get__(self) if isinstance(member, property) else getattr(self._config, name)

    def answer(self, rule: Rule) -> object:
        """Return the rule's answer; None if it reads a field that cannot be read."""
        try:
            return rule(self)
        except _UnreadableError:
            return None


@dataclass(kw_only=True)
class StrategyConfig(LogOptions, ShapingOptions, ServiceOptions, BackendOptions, MachineOptions):
    """All options of a strategy; every field has a default.

    Unknown arguments passed to `from_args` are kept in `extra_args` and read by `get_extra_arg`.
    `TrainConfig` adds the options of a whole run.

    Raises:
        ConfigError: Values of wrong type or out of range; one message names every such field.
    """

    extra_args: dict[str, object] = field(default_factory=dict, repr=False)
    # Names of options that a command, a file or a call set, also to their default.
    explicit: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ConfigError("invalid configuration:\n  " + "\n  ".join(problems))

    def problems(self) -> list[str]:
        """Return problems of the values, one line each; empty if there are none."""
        hints = type_hints(type(self))
        checked = (
            check_value(name, self.__dict__[name], hints[name], info)
            for name, (_, info) in options_of(type(self)).items()
        )
        problems = [problem for problem in checked if problem is not None]
        readable = _Readable(self, {line.split(":")[0] for line in problems})
        for rule in rules_of(type(self)):
            problem = readable.answer(rule)
            problems += problem if isinstance(problem, list) else [str(problem)] if problem else []
        return problems

    def unused_options(self) -> list[str]:
        """Return changed options that do nothing in the chosen mode, one sentence each."""
        unused = []
        for name, (entry, info) in options_of(type(self)).items():
            if self.__dict__[name] != entry.default and not self._acts(info):
                needed = str(info.acts_with)
                verb = "acts only without" if needed.startswith("not ") else "acts only with"
                unused.append(f"{name} {verb} {needed.removeprefix('not ')}")
        return unused

    def _acts(self, info: OptionInfo) -> bool:
        """Return whether the option acts beside the others, or this cannot be decided."""
        acts = info.acts_when or partial(holding, condition=info.acts_with or "")
        return not info.acts_with or _Readable(self, ()).answer(acts) not in (False, "")

    @classmethod
    def from_args(cls, args: Namespace | Mapping[str, object] | StrategyConfig | None) -> Self:
        """Build a configuration from parsed arguments, a mapping or another configuration.

        Unknown names go to `extra_args`. A None for a field that cannot be None means its default.
        A configuration of this class (or of a subclass) is copied and keeps its class.

        Raises:
            TypeError: `args` is none of these.
            ConfigError: A value is wrong.
        """
        if args is None:
            return cls()
        if isinstance(args, cls):
            twin = copy.copy(args)
            twin.extra_args = dict(args.extra_args)
            return twin
        values = without_switches(_as_dict(args))
        nested = values.pop("extra_args", None)
        if isinstance(nested, Mapping):
            values = {**nested, **values}
        if values.pop("disable_engine_sleep", False):
            values["enable_engine_sleep"] = False
        hints = type_hints(cls)
        known: dict[str, object] = {}
        extras: dict[str, object] = {}
        for name, value in values.items():
            if name not in hints:
                extras[name] = value
            elif value is not None or accepts(None, hints[name]):
                known[name] = coerce(value, hints[name])
        return cls(**known, extra_args=extras)  # type: ignore[arg-type]

    def get_extra_arg(self, name: str, default: object = _NO_DEFAULT) -> object:
        """Return the value of an argument that is not a field of `StrategyConfig`.

        Args:
            name: Name of the argument; a field's name returns the field.
            default: Value if nobody set the argument.

        Raises:
            KeyError: Unknown and no default; the message lists the nearest names.
        """
        if name in self.extra_args:
            return self.extra_args[name]
        names = list(self.__dataclass_fields__)
        if name in names:
            value: object = self.__dict__[name]
            return value
        if default is not _NO_DEFAULT:
            return default
        hint = did_you_mean(name, [*self.extra_args, *names])
        raise KeyError(
            f"no argument {name!r} was given and get_extra_arg has no default for it{hint}"
        )

    def deepspeed_options(self) -> list[str]:
        """Return the changed options that only DeepSpeed has."""
        return [
            name
            for name, (entry, info) in options_of(type(self)).items()
            if str(info.acts_with).split()[:2] == ["not", "fsdp"]
            and self.__dict__[name] != entry.default
        ]

    @property
    def lacks_deepspeed(self) -> bool:
        """True if DeepSpeed is neither installed nor asked for; unset `fsdp` then counts as set."""
        return importlib.util.find_spec("deepspeed") is None and not self.deepspeed_options()

    def with_installed_backend(self) -> Self:
        """Return the options with FSDP2 where DeepSpeed is not installed and not asked for."""
        if self.fsdp or not self.lacks_deepspeed:
            return self
        said_once("FSDP2 trains, as with --fsdp: DeepSpeed is not installed")
        chosen = copy.copy(self)
        chosen.fsdp = True
        return chosen

    def builds_on_meta(self, *, has_gpu: bool, weight_bytes: int, is_in_files: bool = True) -> bool:
        """Return whether models are built without memory: as set, else on GPUs above 2 GB.

        Args:
            has_gpu: Whether every rank has a GPU.
            weight_bytes: Size of the actor in bfloat16.
            is_in_files: Whether the files have all weights of the models, so that none is new.
        """
        if self.meta_init is not None:
            return self.meta_init
        return self.fsdp and has_gpu and is_in_files and weight_bytes > META_INIT_BYTES

    def summary(self) -> str:
        """Return all values by group, changed ones marked with `*`, secrets hidden."""
        groups: dict[str, list[str]] = {}
        for name, (entry, info) in options_of(type(self)).items():
            value = self.__dict__[name]
            mark = " " if value == entry.default else "*"
            line = f" {mark} {name} = {shown(value, secret=info.secret)}"
            groups.setdefault(info.group, []).append(line)
        if self.extra_args:
            groups["extra"] = [
                f"   {name} = {shown(value, secret=looks_secret(name))}"
                for name, value in self.extra_args.items()
            ]
        return "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in groups.items())

    def print_config_summary(self) -> None:
        """Print `summary`."""
        print(self.summary())  # noqa: T201


def _as_dict(args: Namespace | Mapping[str, object] | StrategyConfig) -> dict[str, object]:
    if isinstance(args, Mapping):
        return dict(args)
    if isinstance(args, StrategyConfig):
        return dict(args.__dict__)
    try:
        return dict(vars(args))
    except TypeError:
        raise TypeError(
            f"expected a Namespace, a mapping or a StrategyConfig, got {type(args).__name__}"
        ) from None

"""`lightrft config`: resolved options, their schema, their differences, or from another library."""

import json
from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode, UsageError, refuse
from lightrft.cli.options import Parser, add_options, available_options, parse_options
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import did_you_mean
from lightrft.config.toml import format_toml, without_secrets
from lightrft.config.train_config import launch_problems
from lightrft.reporting.files import CONFIG_FILE
from lightrft.tools.commands import parser_of

_SCHEMA_OF = {"at_least": "minimum", "at_most": "maximum", "above": "exclusiveMinimum"}


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft config show --help`.

    Raises:
        UsageError: Arguments that cannot be read.
        ConfigError: Options with wrong values.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: lightrft config {{{','.join(ACTIONS)}}} ...; --help after one explains it")
        return ExitCode.OK
    name, *rest = argv
    if name not in ACTIONS:
        raise UsageError(f"unknown action {name!r}{did_you_mean(name, ACTIONS)}")
    print(ACTIONS[name](rest))
    return ExitCode.OK


def build_parsers() -> list[Parser]:
    """Return the parsers of the actions."""
    show_parser = parser_of("config show", takes_options=True)
    add_options(show_parser)
    others = [parser_of(f"config {name}") for name in ("schema", "diff", "translate")]
    return [show_parser, *others]


def show(argv: Sequence[str]) -> str:
    """Return the options as TOML."""
    config, parsed, problems = parse_options(build_parsers()[0], argv)
    processes: int | None = vars(parsed).get("nproc_per_node")
    if processes is not None and not problems:
        problems = launch_problems(config, processes)
    refuse(problems, ConfigError)
    config = config.overlapped(processes or 1)
    values = without_secrets(config)
    lines: list[str] = []
    group = ""
    for name, info in available_options("config").items():
        is_changed = config.__dict__[name] != TrainConfig.__dataclass_fields__[name].default
        if info.secret or (parsed.changed and not is_changed):
            continue
        if info.group != group:
            group = info.group
            lines += ["", f"# {group}"]
        if values[name] is None:
            lines.append(f"# {name} is unset")
            continue
        mark = "  # changed" if is_changed else ""
        lines.append(f"{name} = {format_toml(values[name])}{mark}")
    return "\n".join(lines).strip()


def schema(argv: Sequence[str]) -> str:
    """Return a JSON schema: types by pydantic, choices, bounds and help from the options."""
    parser_of("config schema").parse_args(argv)
    from pydantic import TypeAdapter

    made = TypeAdapter(TrainConfig).json_schema()
    properties = {}
    for name, info in available_options("config").items():
        option_schema = {**made["properties"][name], "description": info.help}
        if isinstance(info.choices, tuple):  # a registry also takes a user's names
            option_schema["enum"] = list(info.choices)
        # A bound concerns the number, not the null beside it; JSON schema ignores it there.
        limits = {keyword: getattr(info, bound) for bound, keyword in _SCHEMA_OF.items()}
        properties[name] = option_schema | {
            key: value for key, value in limits.items() if value is not None
        }
    return json.dumps(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Options of lightrft train",
            "type": "object",
            "additionalProperties": False,
            "properties": properties,
        },
        indent=2,
    )


def diff(argv: Sequence[str]) -> str:
    """Return the options in which two configurations differ, one line each."""
    options = parser_of("config diff").parse_args(argv)
    left, right = _load(options.left), _load(options.right)
    before, after = without_secrets(left), without_secrets(right)
    lines = [
        f"{name}: {before[name]!r} -> {after[name]!r}"
        for name in before
        if before[name] != after[name]
    ]
    return "\n".join(lines) or "no option differs"


def translate(argv: Sequence[str]) -> str:
    """Write the files of a run from a script of TRL; return what was written."""
    arguments = parser_of("config translate").parse_args(argv)
    from lightrft.tools.translate.options import translate_script

    return translate_script(
        Path(arguments.script), Path(arguments.folder), arguments.nproc_per_node
    )


def _load(name: str) -> TrainConfig:
    path = Path(name)
    path = path / CONFIG_FILE if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"no options at {path}: expected a TOML file or the folder of a run")
    return TrainConfig.load(path)


ACTIONS = {"show": show, "schema": schema, "diff": diff, "translate": translate}

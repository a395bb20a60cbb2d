"""`lightrft config`: resolved options, or options from another library."""

from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode, UsageError, refuse
from lightrft.cli.options import Parser, add_options, available_options, parse_options
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import did_you_mean
from lightrft.config.toml import format_toml, without_secrets
from lightrft.config.train_config import launch_problems
from lightrft.tools.commands import parser_of


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
    add_options(show_parser, available_options())
    return [show_parser, parser_of("config translate")]


def show(argv: Sequence[str]) -> str:
    """Return the options as TOML."""
    config, parsed, problems = parse_options(build_parsers()[0], argv)
    processes: int | None = vars(parsed).get("nproc_per_node")
    if processes is not None and not problems:
        problems = launch_problems(config, processes)
    refuse(problems, ConfigError)
    config = config.overlapped(processes or 1)
    values = without_secrets(config)
    lines, group = list[str](), ""
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
        lines.append(f"{name} = {format_toml(values[name])}" + "  # changed" * is_changed)
    return "\n".join(lines).strip()


def translate(argv: Sequence[str]) -> str:
    """Write the files of a run from a script of TRL; return what was written."""
    arguments = parser_of("config translate").parse_args(argv)
    from lightrft.tools.translate.options import translate_script

    return translate_script(
        Path(arguments.script), Path(arguments.folder), arguments.nproc_per_node
    )


ACTIONS = {"show": show, "translate": translate}

"""`lightrft launch`: what starts a run on several nodes, printed for a look."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.tools.launch import kubernetes, slurm

ACTIONS: dict[str, tuple[Callable[[Sequence[str]], str], str]] = {
    "slurm": (slurm.script, slurm.EXAMPLE),
    "kubernetes": (kubernetes.manifest, kubernetes.EXAMPLE),
}


def build_parsers() -> list[argparse.ArgumentParser]:
    """The parsers of all actions."""
    return [slurm.build_parser(), kubernetes.build_parser()]


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft launch slurm --help` and `lightrft launch kubernetes --help`.

    Raises:
        UsageError: Arguments that cannot be read.
        ConfigError: Options of `lightrft train` that cannot be run on these nodes.
    """
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(f"usage: lightrft launch {{{','.join(ACTIONS)}}} ...\n")
        print("\n".join(f"{action}: {example}" for action, (_, example) in ACTIONS.items()))
        return ExitCode.OK
    if name not in ACTIONS:
        examples = "; ".join(example for _, example in ACTIONS.values())
        raise UsageError(f"lightrft launch knows {' and '.join(ACTIONS)}: got {name!r}; {examples}")
    print(ACTIONS[name][0](argv[1:]))
    return ExitCode.OK

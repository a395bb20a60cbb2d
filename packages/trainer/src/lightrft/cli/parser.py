"""The argument parser of all commands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn

from lightrft.cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse complains about."""
        raise UsageError(f"{message}; see {self.prog} --help")


def at_least(lowest: int) -> Callable[[str], int]:
    """A type of argument: whole numbers from `lowest`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = lowest - 1
        if number < lowest:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a number >= {lowest}")
        return number

    return parse

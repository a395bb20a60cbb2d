"""The `lightrft` command."""

import sys


def command() -> int:
    """Run `lightrft`; Ctrl-C prints one line from the first import on."""
    try:
        from lightrft.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("lightrft: interrupted", file=sys.stderr)
        return 130

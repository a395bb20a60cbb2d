"""Helpers for programs that train: command-line flags."""

from lightrft.utils.arguments import LIBRARY_FLAGS, add_arguments

__all__ = ["LIBRARY_FLAGS", "add_arguments"]

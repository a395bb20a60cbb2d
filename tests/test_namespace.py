"""`lightrft` is a namespace that four distributions share."""

from __future__ import annotations

import importlib


def test_namespace_has_no_init_in_any_member(repository):
    assert not list(repository.glob("packages/*/src/lightrft/__init__.py"))


def test_namespace_joins_all_members():
    namespace = importlib.import_module("lightrft")
    assert getattr(namespace, "__file__", None) is None
    for name in (
        "kernels",
        "engines",
        "strategy",
        "utils",
        "algorithms",
        "models",
        "datasets",
        "rewards",
        "experience",
        "trainer",
        "cli",
    ):
        assert importlib.import_module(f"lightrft.{name}").__name__ == f"lightrft.{name}"

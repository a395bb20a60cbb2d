#!/usr/bin/env bash
# Builds .venv-sglang-cpu, in which the real SGLang runs on a machine without a GPU.
#
# SGLang's compute kernels (package sglang-kernel) need CUDA libraries to be imported. Here they are
# replaced by a module whose functions raise when they are called: with the backends that the
# adapter chooses on a CPU (torch_native attention, pytorch sampling) none of them is.
#
#   scripts/sglang_cpu_env.sh
#   UV_PROJECT_ENVIRONMENT=.venv-sglang-cpu uv run --no-sync pytest -m sglang tests/engines
set -euo pipefail
cd "$(dirname "$0")/.."
export UV_PROJECT_ENVIRONMENT=.venv-sglang-cpu

uv sync --locked --extra sglang --compile-bytecode
uv pip uninstall --python "$UV_PROJECT_ENVIRONMENT/bin/python" sglang-kernel

site=$("$UV_PROJECT_ENVIRONMENT/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/sgl_kernel"
cat >"$site/sgl_kernel/__init__.py" <<'PYTHON'
"""Stands in for SGLang's CUDA kernels: every name exists, every call raises."""

import importlib.abc
import importlib.machinery
import sys
import types

__path__ = []


class _Missing:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} is a CUDA kernel; this environment has none")


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("sgl_kernel."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(f"sgl_kernel.{name}")
PYTHON

"$UV_PROJECT_ENVIRONMENT/bin/python" -c 'import sglang, torch; print("sglang", sglang.__version__, "torch", torch.__version__)'

"""The package's door: lazy names, purity."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lightrft.algorithms


def test_every_exported_name_resolves() -> None:
    for name in lightrft.algorithms.__all__:
        assert getattr(lightrft.algorithms, name) is not None
    assert dir(lightrft.algorithms) == sorted(lightrft.algorithms.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lightrft.algorithms.nothing


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, lightrft.algorithms; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

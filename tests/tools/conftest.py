"""Commands that end with one line."""

from __future__ import annotations

import pytest

from lightrft.cli.main import main


@pytest.fixture
def refused(capsys):
    """Check that a command ends with a code and one line that says something; return the line."""

    def check(argv, code, said=""):
        capsys.readouterr()
        assert main([*map(str, argv)]) == code
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert said in line
        return line

    return check

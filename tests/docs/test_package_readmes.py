"""The Python blocks of the packages' own READMEs run as they stand."""

import re
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[2] / "packages"


def snippet(member):
    """The one Python block of a package's README."""
    text = (PACKAGES / member / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return block


def test_every_package_has_a_readme_with_a_snippet():
    members = sorted(path.parent.name for path in PACKAGES.glob("*/pyproject.toml"))
    assert members == ["engines", "kernels", "strategy", "trainer"]
    assert all(snippet(member).strip() for member in members)


# The trainer's starts a process group: it runs with its wheel, in a process of its own.
@pytest.mark.parametrize("member", ["kernels", "engines", "strategy"])
def test_the_snippet_runs(member, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet(member), f"{member}/README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out

"""Each package can be published: licence, versions that fit, types for whoever installs it."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}

WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def modules_of(name):
    return [path.parent for path in (ROOT / "packages" / name).glob("src/lightrft/*/__init__.py")]


for_every_project = pytest.mark.parametrize("name", PROJECTS)


@for_every_project
def test_it_brings_its_licence_and_says_what_it_is(name):
    project = PROJECTS[name]["project"]
    assert project["license-files"] == ["LICENSE"]
    for path in ("LICENSE", f"packages/{name}/LICENSE"):
        assert "Apache License" in (ROOT / path).read_text()
    assert (ROOT / "packages" / name / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert project["description"].endswith(".")
    assert {"authors", "classifiers", "keywords"} <= set(project)


@for_every_project
def test_it_asks_for_members_of_its_own_version(name):
    versions = {each["project"]["version"] for each in PROJECTS.values()}
    (version,) = versions
    project = PROJECTS[name]["project"]
    asked = [each for each in project["dependencies"] if re.match(r"lightrft-", each)]
    assert all(each.endswith(f"=={version}") for each in asked)
    assert asked or name == "kernels"


def test_the_whole_brings_every_member_and_every_extra():
    version = PROJECTS["trainer"]["project"]["version"]
    assert (WHOLE["name"], WHOLE["version"]) == ("lightrft", version)
    assert WHOLE["dependencies"] == [f"lightrft-trainer=={version}"]
    expected = {
        extra: [f"lightrft-{name}[{extra}]"]
        for name, each in PROJECTS.items()
        for extra in each["project"].get("optional-dependencies", {})
    }
    assert WHOLE["optional-dependencies"] == expected
    described = ("license", "license-files", "authors", "keywords", "classifiers")
    for each in PROJECTS.values():
        assert {key: each["project"][key] for key in described} == {
            key: WHOLE[key] for key in described
        }


@for_every_project
def test_its_modules_are_all_named_and_typed(name):
    modules = modules_of(name)
    assert modules
    for module in modules:
        assert (module / "py.typed").is_file(), module
    # The other build backend takes the folder as a whole.
    if "uv" in PROJECTS[name]["tool"] and "build-backend" in PROJECTS[name]["tool"]["uv"]:
        given = PROJECTS[name]["tool"]["uv"]["build-backend"]["module-name"]
        named = [given] if isinstance(given, str) else given
        assert sorted(named) == sorted(f"lightrft.{module.name}" for module in modules)

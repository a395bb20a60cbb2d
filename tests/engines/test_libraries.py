"""Private names of other libraries: all are in a table, and a missing one is named at the start."""

import ast
import importlib.metadata
import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers.masking_utils
from tests.programs import run_python

from lightrft.engines import libraries
from lightrft.engines.libraries import LIBRARIES, LibraryError, check_library

ROOT = Path(__file__).resolve().parents[2]
# Python's, nn.Module's, a type that no run reads, and what transformers reads if it is there.
OTHERS = {"_make", "_replace", "_exit", "_ArgumentGroup", "_ActionsContainer", "_actions"}
OTHERS |= {
    "_option_string_actions",
    "_parameters",
    "_apply",
    "_BaseAutoModelClass",
    "_weight_conversions",
}


@pytest.mark.parametrize(
    "package",
    ["torch", "transformers", pytest.param("bitsandbytes", marks=pytest.mark.full), "deepspeed"],
)
def test_every_name_of_the_table_exists(package):
    if package in ("bitsandbytes", "deepspeed"):
        pytest.importorskip(package)
    library = LIBRARIES[package]
    # Modules of pictures need torchvision.
    single = library.single if find_spec("torchvision") else {}
    assert library.missing({**library.names, **single}) == []
    check_library(package)
    assert logging.getLogger("bitsandbytes").level == logging.ERROR  # peft imports it


def private_names(tree):
    """Private attributes of others and imports of private names."""
    ours = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    ours |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_stored(n)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (each.name for each in node.names if is_private(each.name))
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours:
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            yield from [node.attr] * (owner not in ("self", "cls"))


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def is_stored(node):
    return isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"


def test_every_private_name_that_is_used_stands_in_a_table():
    known = {
        path.rpartition(":")[2].rpartition(".")[2]
        for library in LIBRARIES.values()
        for paths in (*library.names.values(), *library.single.values())
        for path in paths
    }
    for file in ROOT.glob("packages/*/src/**/*.py"):
        used = set(private_names(ast.parse(file.read_text())))
        assert used <= known | OTHERS, (file, used - known - OTHERS)


def test_a_missing_name_is_one_line_with_library_version_name_and_remedy(monkeypatch):
    monkeypatch.delattr(transformers.masking_utils, "sdpa_mask")
    with pytest.raises(LibraryError) as error:
        check_library("transformers")
    version = importlib.metadata.version("transformers")
    assert str(error.value) == (
        f"transformers {version} lacks transformers.masking_utils.sdpa_mask, which the attention "
        f"of trainer and hf engine needs: install transformers{LIBRARIES['transformers'].limits}"
    )


def test_an_attribute_that_only_the_constructor_sets_is_missed(monkeypatch):
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    def without(self):
        self._other = None

    for name, value in vars(FSDPState).copy().items():
        if "_comm_ctx" in getattr(getattr(value, "__code__", None), "co_names", ()):
            monkeypatch.setattr(FSDPState, name, without)
    with pytest.raises(LibraryError, match=r"FSDPState\._comm_ctx, which FSDP2 without a backward"):
        check_library("torch")


def test_an_import_that_fails_is_explained_by_the_table(monkeypatch):
    error = ImportError("cannot import name 'sdpa_mask'", name="transformers.masking_utils")
    assert libraries.explained(error) is error
    monkeypatch.delattr(transformers.masking_utils, "sdpa_mask")
    assert isinstance(libraries.explained(error), LibraryError)
    other = ImportError("no x", name="x")
    assert libraries.explained(other) is other


def test_a_version_that_is_not_tested_is_one_line(monkeypatch, caplog):
    monkeypatch.setattr(libraries, "installed_version", lambda _: "99.1")
    libraries.say_untested.cache_clear()
    for _ in range(2):
        check_library("torch")
    (record,) = caplog.records
    assert "torch 99.1: tested are >=2.11,<" in record.getMessage()
    libraries.say_untested.cache_clear()


def test_a_candidate_of_a_release_counts_as_the_release():
    library = libraries.Library("x", ((1, 2), (1, 13)), "y", {}, {})
    assert library.is_tested("1.12rc1+cpu")  # not 1.121
    assert not library.is_tested("1.13.0rc1")


@pytest.mark.vllm
def test_every_name_of_vllm_exists():
    pytest.importorskip("vllm")
    check_library("vllm")


def test_no_table_imports_its_library():
    code = "import sys, lightrft.engines.libraries; print([n for n in sys.modules if n in "
    code += f"{list(LIBRARIES)}])"
    done = run_python("-c", code, code=0)
    assert done.stdout.strip() == "[]"

"""Choices by name, by file, by module and by decorator; hyper-parameters from the signature."""

import pytest

from lightrft.config import ConfigError, register
from lightrft.config.registry import (
    ADVANTAGE_ESTIMATORS,
    LOGGERS,
    POLICY_LOSSES,
    REGISTRIES,
    REWARDS,
    bind,
    keyword_options,
    split_reference,
)
from lightrft.rewards.worker import ReportedError
from lightrft.rollout.user_code import absolute_reference, load_user_code


@pytest.mark.parametrize("registry", REGISTRIES.values(), ids=REGISTRIES)
def test_every_import_string_of_a_table_leads_somewhere(registry):
    for name in registry:
        assert registry.load(name) is not None


@pytest.mark.parametrize(
    "text, parts",
    [
        ("own.py:f", ("own.py", "f")),
        ("/a b/own.py:f", ("/a b/own.py", "f")),
        ("package.module:f", ("package.module", "f")),
        ("own.py", None),
        ("a:b c", None),
        (":f", None),
        ("", None),
    ],
)
def test_a_reference_is_a_file_or_a_module_and_a_name(text, parts):
    assert split_reference(text) == parts
    assert (text in REWARDS) == (parts is not None)


@pytest.mark.parametrize("text", ["own.py:f,other.py:f", "name,own.py:f", "own.py:f,name"])
def test_commas_between_choices_are_named(tmp_path, text):
    with pytest.raises(ConfigError, match="separated by spaces, not by commas"):
        LOGGERS.load(text)
    with pytest.raises((ReportedError, ConfigError), match="separated by spaces, not by commas"):
        load_user_code(absolute_reference(text, "agent")[0], "agent")
    (tmp_path / "a,b").mkdir()
    (tmp_path / "a,b/own.py").write_text("def f(): ...\n")
    assert callable(LOGGERS.load(f"{tmp_path}/a,b/own.py:f"))


def test_a_file_is_one_module_for_each_content(tmp_path):
    (tmp_path / "own.py").write_text("def f(): ...\n")
    first = POLICY_LOSSES.load(f"{tmp_path}/own.py:f")
    assert POLICY_LOSSES.load(f"{tmp_path}/own.py:f") is first
    (tmp_path / "own.py").write_text("def f(): return 1\n")
    assert POLICY_LOSSES.load(f"{tmp_path}/own.py:f") is not first


def test_register_adds_a_name_once(monkeypatch):
    monkeypatch.setattr(LOGGERS, "entries", dict(LOGGERS.entries))  # later tests read them

    @register("loggers", "registered_by_a_test")
    class Logger: ...

    assert LOGGERS.load("registered_by_a_test") is Logger
    assert "registered_by_a_test" in LOGGERS
    assert not LOGGERS.is_built_in("registered_by_a_test")
    with pytest.raises(ConfigError, match="there is a logger 'registered_by_a_test' already"):
        register("loggers", "registered_by_a_test")(Logger)
    with pytest.raises(ConfigError, match="no registry 'lgogers'; did you mean loggers"):
        register("lgogers", "x")


def example(rows, *, a=1.0, b=None, c="x"):
    return rows, a, b, c


def test_hyper_parameters_are_the_keyword_only_arguments():
    assert list(keyword_options(example)) == ["a", "b", "c"]
    assert bind(example, {}, owner="example") is example
    assert bind(example, {"a": 2, "b": 3}, owner="example")(0) == (0, 2.0, 3, "x")


def test_every_hyper_parameter_of_a_built_in_choice_has_a_default_and_a_type():
    for registry in (POLICY_LOSSES, ADVANTAGE_ESTIMATORS):
        for name in registry:
            for option in keyword_options(registry.load(name)).values():
                assert option.default is not option.empty, (name, option)
                assert option.annotation is not option.empty, (name, option)

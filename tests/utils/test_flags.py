"""One description of flags for the library's and the command's parser."""

import argparse
from collections.abc import Mapping
from dataclasses import fields

import pytest

from lightrft.cli.options import add_options, available_options
from lightrft.config import TrainConfig
from lightrft.config.options import FlagShape, flag_shape, type_hints
from lightrft.config.other_names import SWITCHES
from lightrft.utils import add_arguments


@pytest.mark.parametrize(
    "hint, shape",
    [
        (bool, FlagShape("switch", opposites=("--no_x",))),
        (bool | None, FlagShape("switch", opposites=("--no_x",))),
        (int, FlagShape("value", int)),
        (float | None, FlagShape("value", float)),
        (str | bool | None, FlagShape("value or switch")),
        (tuple[float, float], FlagShape("values", float, 2)),
        (tuple[str, ...], FlagShape("values", str, "+")),
        (str | tuple[str, ...] | None, FlagShape("values", str, "+")),
        (Mapping[str, str | int] | None, FlagShape("pairs")),
    ],
)
def test_the_annotation_decides_the_form(hint, shape):
    assert flag_shape("x", hint) == shape


def test_what_is_enabled_can_be_disabled():
    assert flag_shape("enable_x", bool).opposites == ("--no_enable_x", "--disable_x")


def test_both_parsers_have_the_same_options_and_read_the_same_values():
    library, command = argparse.ArgumentParser(), argparse.ArgumentParser()
    names = set(available_options())
    add_arguments(library, config_type=TrainConfig, names=names)
    add_options(command, available_options())

    def flags(parser):
        # argparse has no public list of its options.
        return {action.dest for action in parser._actions} - {"help", "config"}

    assert flags(command) == names | set(SWITCHES)
    hints = type_hints(TrainConfig)
    pairs = {name for name in names if flag_shape(name, hints[name]).form == "pairs"}
    assert names - flags(library) == pairs
    words = [
        "--temperature",
        "0.5",
        "--adam_betas",
        "0.8",
        "0.9",
        "--fsdp",
        "--reward_fn",
        "a",
        "b",
        "--use_tensorboard",
    ]
    found = TrainConfig.from_args(library.parse_args(words))
    default = TrainConfig()
    changed = {
        entry.name: found.__dict__[entry.name]
        for entry in fields(TrainConfig)
        if found.__dict__[entry.name] != default.__dict__[entry.name]
    }
    assert changed == {
        "temperature": 0.5,
        "adam_betas": (0.8, 0.9),
        "fsdp": True,
        "reward_fn": ("a", "b"),
        "use_tensorboard": True,
    }

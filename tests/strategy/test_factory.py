import argparse
import inspect
import sys

import pytest
from tests.ranks import run_multiprocess

from lightrft.strategy import FakeStrategy, StrategyBase, StrategyConfig, get_strategy

SETTINGS = {"train_batch_size": 4, "seed": 3, "max_norm": 0.5, "custom": "kept"}


def backends():
    from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy

    found = [FakeStrategy, FSDPV2Strategy]
    if _is_installed("deepspeed"):
        from lightrft.strategy.deepspeed.strategy import DeepspeedStrategy

        found.append(DeepspeedStrategy)
    return found


def _is_installed(package):
    from importlib.util import find_spec

    return find_spec(package) is not None


def test_no_backend_has_methods_of_its_own():
    """A program that runs on one backend finds all that it calls on the others."""
    common = {name for name, _ in inspect.getmembers(StrategyBase, inspect.isroutine)}
    for backend in backends():
        own = {name for name, _ in inspect.getmembers(backend, inspect.isroutine)}
        assert {name for name in own - common if not name.startswith("_")} == set(), backend


def choose(rank, world_size):
    for given in (
        argparse.Namespace(fsdp=True, **SETTINGS),
        {"fsdp": True, **SETTINGS},
        StrategyConfig.from_args({"fsdp": True, **SETTINGS}),
    ):
        strategy = get_strategy(given)
        assert type(strategy).__name__ == "FSDPV2Strategy"
        assert strategy.args is given
        assert (strategy.seed, strategy.max_norm, strategy.accumulated_gradient) == (3, 0.5, 4)
        assert strategy.config.get_extra_arg("custom") == "kept"


def choose_default(rank, world_size):
    strategy = get_strategy({"zero_stage": 1, **SETTINGS})
    assert type(strategy).__name__ == "DeepspeedStrategy"
    assert strategy.config.zero_stage == 1


def test_fsdp_is_chosen_from_every_form_of_arguments():
    run_multiprocess(choose, 1)


@pytest.mark.deepspeed
def test_deepspeed_is_the_default():
    run_multiprocess(choose_default, 1, timeout_seconds=120)


def test_missing_deepspeed_names_the_alternative_where_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"zero_stage: the DeepSpeed strategy needs .*--fsdp"):
        get_strategy({"zero_stage": 3})


def choose_installed(rank, world_size):
    sys.modules["deepspeed"] = None
    strategy = get_strategy(SETTINGS)
    assert type(strategy).__name__ == "FSDPV2Strategy"


def test_a_plain_install_trains_with_fsdp():
    run_multiprocess(choose_installed, 1)

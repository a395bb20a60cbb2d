import importlib.util

import pytest
import torch

from lightrft import engines
from lightrft.engines import EngineConfig, build_engine, resolve_engine_type
from lightrft.engines.factory import ENGINES, EngineFacts


def test_the_embedded_engine_has_its_name(tiny_model):
    # The others need their package and seconds to start; their own tests do it.
    assert build_engine(EngineConfig("hf", ""), module=tiny_model()).name == "hf"


def test_an_engine_of_ones_own_is_named_by_its_module(tiny_model, monkeypatch):
    monkeypatch.setitem(ENGINES, "mine", "lightrft.engines.hf.engine:HFEngine")
    build_engine(EngineConfig("mine", ""), module=tiny_model())


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(ValueError, match=r"\(did you mean vllm\?\); known: vllm, sglang, hf"):
        resolve_engine_type("vlm")


def test_an_order_that_nobody_knows_is_no_known_order():
    facts = EngineFacts(known_order="top_p first")
    assert not facts.has_known_order(top_k=3, top_p=0.5, min_p=0)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_backend_that_cannot_start_says_what_to_do(name):
    if importlib.util.find_spec(name) is None:
        with pytest.raises(ImportError, match=rf"install lightrft\[{name}\]"):
            build_engine(EngineConfig(name, ""))
    else:
        with pytest.raises(ValueError, match="needs the directory of a Hugging Face checkpoint"):
            build_engine(EngineConfig(name, ""))


def test_auto_takes_hf_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("a GPU is present")
    assert resolve_engine_type("auto") == "hf"


def test_every_exported_name_exists():
    for name in engines.__all__:
        assert getattr(engines, name).__name__ in (name, "Literal")
    with pytest.raises(AttributeError, match="nonsense"):
        _ = engines.nonsense

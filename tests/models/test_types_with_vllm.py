"""Types of models in the real vLLM: syncs of weights and adapters are what the page says."""

import importlib.util
import json
import sys

import pytest
from tests.models.all_types import types

pytestmark = pytest.mark.vllm
PATH = types.ROOT / "scripts" / "vllm_types.py"
VERDICTS = json.loads(types.WITH_VLLM.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def vllm_types():
    spec = importlib.util.spec_from_file_location("vllm_types", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_types"] = module
    spec.loader.exec_module(module)
    return module


def test_every_type_has_a_verdict(vllm_types):
    assert VERDICTS.keys() == vllm_types.CASES.keys()


@pytest.mark.parametrize("model_type", VERDICTS)
def test_a_type_in_vllm_is_what_the_page_says(model_type, vllm_types):
    verdict = vllm_types.examine(model_type)
    assert vllm_types.asdict(verdict) == VERDICTS[model_type], "python scripts/vllm_types.py"

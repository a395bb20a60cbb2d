"""Types of models in the real vLLM: syncs of weights and adapters are what the page says."""

import json

import pytest
from tests.models.all_types import types
from tests.programs import load_script

pytestmark = pytest.mark.vllm
VERDICTS = json.loads(types.WITH_VLLM.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def vllm_types():
    return load_script(types.ROOT / "scripts/vllm_types.py")


def test_every_type_has_a_verdict(vllm_types):
    assert VERDICTS.keys() == vllm_types.CASES.keys()


@pytest.mark.parametrize("model_type", VERDICTS)
def test_a_type_in_vllm_is_what_the_page_says(model_type, vllm_types):
    verdict = vllm_types.examine(model_type)
    assert vllm_types.asdict(verdict) == VERDICTS[model_type], "python scripts/vllm_types.py"

"""A backend's own sampling parameters, turned into ours."""

from types import SimpleNamespace

import pytest

from lightrft.engines import SamplingParams
from lightrft.engines.native_params import params_of_native

DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_new_tokens": 16,
    "min_tokens": 0,
    "stop": [],
    "stop_token_ids": None,
    "ignore_eos": False,
    "seed": None,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "detokenize": True,
}


class Native(SimpleNamespace):
    """A backend's own object."""

    def __init__(self, **given):
        super().__init__(**{**DEFAULTS, **given})


def convert(**given):
    return params_of_native(Native(**given))


def test_fields_with_a_counterpart_are_taken_over():
    same = {"n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "min_tokens": 2}
    same |= {"ignore_eos": True, "seed": 8}
    found = convert(max_new_tokens=9, stop=["a"], stop_token_ids=[4, 5], detokenize=False, **same)
    assert found == SamplingParams(max_tokens=9, stop=("a",), stop_token_ids=(4, 5), **same)


@pytest.mark.parametrize("everything", [0, -1, 1 << 30])
def test_every_spelling_of_all_tokens_is_understood(everything):
    assert convert(top_k=everything) == SamplingParams(max_tokens=16)


def test_fields_that_cannot_be_honoured_are_refused_together():
    with pytest.raises(ValueError) as caught:
        convert(repetition_penalty=1.2, logit_bias={3: 1.0})
    text = str(caught.value)
    assert "logit_bias={3: 1.0}, repetition_penalty=1.2" in text
    assert "usable: " in text


def test_a_bound_is_needed():
    with pytest.raises(ValueError, match="set max_new_tokens"):
        convert(max_new_tokens=None)


def test_one_stop_string_is_a_list_of_one():
    assert convert(stop="end").stop == ("end",)

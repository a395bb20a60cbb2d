"""The embedded engine runs a prompt once for all rows that begin with it."""

import pytest
from tests.engines.altered_engines import embedded
from tests.engines.plain_forward import largest_error, prompts
from tests.models.all_types import types

from lightrft.engines import SamplingParams
from lightrft.engines.types import GenerationRequest


class Prompts:
    """Rows of each pass over more than one token a row."""

    def __init__(self, engine):
        self.rows = []
        engine.native.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, _, args, inputs):
        rows, width = inputs["input_ids"].shape
        if width > 1:
            self.rows.append(rows)


# Attention alone; windows, convolutions and recurrences.
@pytest.mark.parametrize("model_type", ["qwen3", "llama", "gemma3_text", "lfm2", "qwen3_5_text"])
@pytest.mark.parametrize("lengths", [(9, 9), (9, 3, 6, 12)])
def test_a_group_s_prompt_is_run_once(model_type, lengths):
    model = types.tiny_model(model_type).eval()
    engine = embedded(model)
    engine.generate(prompts(4), SamplingParams(max_tokens=2))  # trials of the cache
    seen = Prompts(engine)
    completions = engine.generate(prompts(*lengths), SamplingParams(max_tokens=6, n=4))
    assert seen.rows == [len(lengths)]
    assert largest_error(model, completions) < 2e-4


def test_branches_that_go_on_from_one_context_are_run_once():
    """Branches are requests of their own; those that have grown apart are run whole."""
    engine = embedded(types.tiny_model("qwen3").eval())
    seen = Prompts(engine)
    context = (5, 6, 7, 8, 9, 10)
    branches = [GenerationRequest(context, request_id=i) for i in range(5)]
    apart = [GenerationRequest((*context, 11 + i), request_id=9 + i) for i in range(2)]
    engine.generate([*branches, *apart], SamplingParams(max_tokens=3))
    assert seen.rows == [1 + 2]

from __future__ import annotations

import pytest
import torch
from tests.engines.fake_engine import FakeEngine

from lightrft.engines import (
    EngineConfig,
    GenerationRequest,
    MultiModalInputs,
    SamplingParams,
    WeightPiece,
    build_engine,
)

CONFIG = EngineConfig("fake", "")
REQUEST = GenerationRequest((4, 5, 6), 3)


def test_calls_are_recorded_in_order():
    engine = FakeEngine(CONFIG)
    engine.sleep()
    engine.wake_up()
    engine.begin_weight_update()
    engine.load_weights([])
    engine.finish_weight_update()
    engine.reset_caches()
    engine.set_weights_version(1)
    engine.generate([REQUEST], SamplingParams(max_tokens=1))
    assert engine.calls == [
        "sleep",
        "wake_up",
        "begin_weight_update",
        "load_weights",
        "finish_weight_update",
        "reset_caches",
        "set_weights_version",
        "generate",
    ]


def test_a_script_is_replayed_with_its_logprobs():
    def script(request, index):
        return [request.request_id, index, 9, 9], [-1.0, -2.0, -3.0, -4.0]

    engine = FakeEngine(CONFIG, script=script)
    full, cut = (engine.generate([REQUEST], SamplingParams(max_tokens=n, n=2))[1] for n in (5, 3))
    assert (full.output_token_ids, full.finish_reason) == ((3, 1, 9, 9), "stop")
    assert full.output_logprobs == (-1.0, -2.0, -3.0, -4.0)
    assert (cut.output_token_ids, cut.finish_reason) == ((3, 1, 9), "length")
    assert cut.output_logprobs == (-1.0, -2.0, -3.0)


def test_a_script_without_logprobs_is_scored():
    engine = FakeEngine(CONFIG, script=lambda request, index: ([7, 8], None))
    (completion,) = engine.generate([REQUEST], SamplingParams(max_tokens=5))
    assert completion.output_logprobs == tuple(engine.score([4, 5, 6, 7, 8])[3:])


def test_a_prompt_remembers_its_weights_until_caches_are_reset():
    engine = FakeEngine(CONFIG)
    names = [p.name for p in engine.parameter_manifest() if p.tied_to is None]
    values = {p.name: torch.ones(p.shape) for p in engine.parameter_manifest() if p.name in names}
    assert engine.alias_weights(values)
    params = SamplingParams(max_tokens=4)
    before = engine.generate([REQUEST], params)
    values[names[0]].mul_(2)
    assert engine.generate([REQUEST], params) == before
    engine.reset_caches()
    assert engine.generate([REQUEST], params) != before


def test_every_bit_of_the_weights_counts():
    engine = FakeEngine(CONFIG)
    parameter = engine.parameter_manifest()[0]
    value = torch.zeros(parameter.shape)
    outputs = set()
    for change in (0.0, 1e-30, -0.0):
        value.view(-1)[5] = change
        engine.begin_weight_update()
        piece = WeightPiece(parameter.name, parameter.shape, 0, value.view(-1))
        engine.load_weights([piece])
        engine.finish_weight_update()
        engine.reset_caches()
        outputs.add(engine.generate([REQUEST], SamplingParams(max_tokens=6))[0].output_token_ids)
    assert len(outputs) == 3


def test_images_are_accepted_and_recorded():
    engine = FakeEngine(CONFIG)
    request = GenerationRequest((), 1, prompt_text="look: ", multi_modal=MultiModalInputs(("img",)))
    (completion,) = engine.generate([request], SamplingParams(max_tokens=2))
    assert len(completion.prompt_token_ids) == 6
    assert engine.requests == [request]


def test_a_module_gives_names_values_and_ties(tiny_model):
    module = tiny_model("qwen3", is_tied=True)
    engine = build_engine(EngineConfig("fake", "", dtype="bfloat16"), module=module)
    manifest = {p.name: p for p in engine.parameter_manifest()}
    assert list(manifest) == [n for n, _ in module.named_parameters(remove_duplicate=False)]
    assert manifest["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert {p.dtype for p in manifest.values()} == {torch.bfloat16}


def test_unknown_options_and_stop_strings_are_refused():
    with pytest.raises(ValueError, match="unusable options of the fake engine: speed"):
        FakeEngine(EngineConfig("fake", "", options={"speed": 1}))
    with pytest.raises(ValueError, match="no tokenizer"):
        FakeEngine(CONFIG).generate([REQUEST], SamplingParams(stop=("x",)))

from __future__ import annotations

import json

import pytest
import torch
from tests.engines.fake_engine import FakeEngine
from torch import nn

from lightrft.engines.base import StaleEngineError
from lightrft.engines.types import (
    EngineConfig,
    EngineStatus,
    GenerationRequest,
    MultiModalInputs,
    SamplingParams,
)
from lightrft.strategy import FakeStrategy, get_fake_strategy

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CONFIG = EngineConfig(engine_type="fake", model_path="")


def echo(request: GenerationRequest, index: int):
    """Tokens that tell the prompt and the sample."""
    return [sum(request.prompt_token_ids) % 1000, len(request.prompt_token_ids), index], [-0.5] * 3


def strategy_with(engine: FakeEngine | None = None, **settings) -> FakeStrategy:
    strategy = get_fake_strategy({"train_batch_size": 1, **settings})
    if engine is not None:
        strategy.inference_engine = engine
    return strategy


def echo_engine() -> FakeEngine:
    return FakeEngine(CONFIG, script=echo)


def outputs(completions):
    return [c.output_token_ids for c in completions]


def test_without_an_engine():
    strategy = strategy_with()
    with pytest.raises(NotImplementedError, match="not initialized"):
        strategy.gather_and_generate({}, [[1]])
    with pytest.raises(NotImplementedError, match="not initialized"):
        strategy.engine_generate_local({}, [[1]])
    assert strategy.update_engine_weights(nn.Linear(2, 2)) is None
    strategy.maybe_sleep_inference_engine()
    strategy.wakeup_inference_engine()
    assert strategy.inference_engine_status is EngineStatus.SLEEPED


def test_neither_or_both_inputs_are_errors():
    strategy = strategy_with(echo_engine())
    with pytest.raises(ValueError, match="Either prompt_token_ids or multi_modal_inputs"):
        strategy.engine_generate_local({})
    with pytest.raises(ValueError, match="can not be provided at the same time"):
        strategy.engine_generate_local({}, [[1]], [{"prompt": "x"}])
    with pytest.raises(ValueError, match="all_prompt_token_ids or all_prompts"):
        strategy.gather_and_generate({})


def test_local_generation_takes_one_prompt_many_prompts_and_multimodal_inputs():
    engine = echo_engine()
    strategy = strategy_with(engine)
    assert outputs(strategy.engine_generate_local({}, [4, 5])) == [(9, 2, 0)]
    assert outputs(strategy.engine_generate_local({"n": 2}, [[4], [5, 6]])) == [
        (4, 1, 0),
        (4, 1, 1),
        (11, 2, 0),
        (11, 2, 1),
    ]
    item = {"prompt": "hi", "multi_modal_data": {"image": ["a", "b"], "video": "v"}}
    strategy.engine_generate_local({}, multi_modal_inputs=[item])
    assert engine.requests[-1].prompt_text == "hi"
    assert engine.requests[-1].multi_modal == MultiModalInputs(("a", "b"), ("v",))


@pytest.mark.parametrize(
    "given", [SamplingParams(n=2, max_tokens=2), {"n": 2, "max_tokens": 2, "stop": []}]
)
def test_sampling_parameters_have_two_forms(given):
    found = strategy_with(echo_engine()).gather_and_generate(given, [[3], [4]])
    assert outputs(found) == [(3, 1), (3, 1), (4, 1), (4, 1)]
    assert [c.sample_index for c in found] == [0, 1, 0, 1]


def test_other_sampling_parameters_are_refused_with_the_accepted_forms():
    strategy = strategy_with(echo_engine())
    with pytest.raises(TypeError, match="SamplingParams or a mapping"):
        strategy.gather_and_generate(3, [[1]])
    with pytest.raises(ValueError, match="did you mean temperature"):
        strategy.gather_and_generate({"temprature": 1.0}, [[1]])
    with pytest.raises(ValueError, match="top_p"):
        strategy.gather_and_generate({"top_p": 2.0}, [[1]])
    assert strategy.inference_engine_status is EngineStatus.SLEEPED


def test_requests_keep_their_ids_and_bare_prompts_never_share_one():
    engine = echo_engine()
    strategy = strategy_with(engine)
    strategy.gather_and_generate({}, [[1], [2]])
    strategy.gather_and_generate({}, [[1]])
    strategy.gather_and_generate({}, [GenerationRequest((5,), request_id=77)])
    assert [r.request_id for r in engine.requests] == [0, 1, 2, 77]


def test_no_prompts_no_engine_call():
    engine = echo_engine()
    assert strategy_with(engine).gather_and_generate({}, []) == []
    assert "generate" not in engine.calls


def test_images_reach_the_engine_without_counts():
    engine = echo_engine()
    strategy_with(engine).gather_and_generate(
        {}, all_prompts=[f"a{IMAGE}", f"b{IMAGE}"], all_images=["one", None]
    )
    assert [r.prompt_text for r in engine.requests] == [f"a{IMAGE}", "b"]
    assert [r.multi_modal.images for r in engine.requests] == [("one",), ()]


def test_images_need_text():
    with pytest.raises(ValueError, match="all_prompts"):
        strategy_with(echo_engine()).gather_and_generate({}, [[1]], all_images=["one"])


def test_only_none_images_mean_text():
    engine = echo_engine()
    found = strategy_with(engine).gather_and_generate(
        {}, [[3]], all_prompts=["x"], all_images=[None]
    )
    assert outputs(found) == [(3, 1, 0)]
    assert engine.requests[0].prompt_text is None


def test_setup_wakes_sends_weights_and_sleeps():
    strategy = strategy_with(pretrain=None)
    actor = nn.Linear(3, 2)
    engine = strategy.setup_inference_engine(None, "fake", actor)
    assert engine is strategy.inference_engine
    assert strategy.inference_engine_type == strategy.config.engine_type == "fake"
    assert strategy.inference_engine_status is EngineStatus.SLEEPED
    assert engine.calls[-1] == "sleep"
    assert engine.calls.index("set_weights_version") < engine.calls.index("sleep")
    assert strategy.last_weight_sync.weights_version == engine.weights_version == 0
    strategy.close()
    assert engine.calls[-1] == "close"
    assert strategy.inference_engine is None
    strategy.close()


def test_generation_wakes_and_sleeps_as_told():
    engine = echo_engine()
    strategy = strategy_with(engine)
    strategy.maybe_sleep_inference_engine()
    strategy.maybe_sleep_inference_engine()
    assert engine.calls == ["sleep"]
    strategy.gather_and_generate({}, [[1]], sleep_engine=False)
    assert engine.calls == ["sleep", "wake_up", "generate"]
    assert strategy.inference_engine_status is EngineStatus.WAKEUP
    strategy.wakeup_inference_engine()
    strategy.gather_and_generate({}, [[1]])
    assert engine.calls[3:] == ["generate", "sleep"]
    assert strategy.inference_engine_status is EngineStatus.SLEEPED


def test_engine_never_sleeps_when_sleep_is_disabled():
    strategy = strategy_with(enable_engine_sleep=False)
    engine = strategy.setup_inference_engine(None, "fake", nn.Linear(2, 3))
    strategy.gather_and_generate({"max_tokens": 1}, [[1]])
    strategy.maybe_sleep_inference_engine()
    assert "sleep" not in engine.calls
    assert strategy.inference_engine_status is EngineStatus.WAKEUP


def test_failed_generation_leaves_the_engine_asleep_and_usable():
    def script(request, index):
        if request.prompt_token_ids == (13,):
            raise ArithmeticError("planted")
        return echo(request, index)

    engine = FakeEngine(CONFIG, script=script)
    strategy = strategy_with(engine)
    with pytest.raises(ArithmeticError, match="planted") as caught:
        strategy.gather_and_generate({}, [[13]])
    assert "rank 0" in "".join(caught.value.__notes__)
    assert strategy.inference_engine_status is EngineStatus.SLEEPED
    assert outputs(strategy.gather_and_generate({}, [[4]])) == [(4, 1, 0)]


def test_weights_of_any_actor_arrive_and_the_engine_stays_awake():
    torch.manual_seed(0)
    strategy = strategy_with(actor_learning_rate=0.1, lr_warmup_ratio=0.0)
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    engine = strategy.setup_inference_engine(None, "fake", first)
    params = {"max_tokens": 4, "seed": 1}

    def sample():
        return outputs(strategy.gather_and_generate(params, [GenerationRequest((1, 2))]))

    before = sample()
    assert sample() == before
    strategy.update_engine_weights(second)
    assert strategy.inference_engine_status is EngineStatus.WAKEUP
    with_second = sample()
    assert with_second != before
    strategy.update_engine_weights(first)
    assert sample() == before
    hashes = engine.hash_parameters()
    strategy.update_engine_weights(second)
    assert engine.hash_parameters() != hashes


def test_optimizer_step_makes_the_engine_stale_until_the_next_update():
    strategy = strategy_with(actor_learning_rate=0.1, lr_warmup_ratio=0.0)
    actor, *_ = strategy.prepare_models_and_optimizers(nn.Linear(3, 2), None, None, None, None, 10)
    strategy.setup_inference_engine(None, "fake", actor)
    strategy.backward(actor.model(torch.ones(1, 3)).sum(), actor, actor.optimizer)
    strategy.optimizer_step(actor.optimizer, actor, actor.scheduler)
    with pytest.raises(StaleEngineError, match="update_engine_weights"):
        strategy.gather_and_generate({"max_tokens": 1}, [[1]])
    strategy.update_engine_weights(actor)
    strategy.gather_and_generate({"max_tokens": 1}, [[1]])


def test_a_second_engine_takes_the_place_of_the_first():
    strategy = strategy_with()
    first = strategy.setup_inference_engine(None, "fake", nn.Linear(2, 3))
    second = strategy.setup_inference_engine(None, "fake", nn.Linear(2, 3))
    assert first.calls[-1] == "close"
    assert strategy.inference_engine is second
    assert "close" not in second.calls


@pytest.mark.parametrize("unknown", ["tgi", "VLLM", ""])
def test_unknown_engine_type(unknown):
    with pytest.raises(ValueError, match="Unsupported engine type"):
        strategy_with().setup_inference_engine(None, unknown)


def test_engine_type_has_one_truth_afterwards(capsys):
    strategy = strategy_with(engine_type="vllm")
    strategy.setup_inference_engine(None, "fake", nn.Linear(2, 3))
    assert strategy.config.engine_type == strategy.engine_type == "fake"
    assert strategy.inference_engine_type == "fake"
    assert "the configuration said vllm" in capsys.readouterr().out


def test_engine_without_a_model_is_refused_early():
    with pytest.raises(ValueError, match="pretrain"):
        strategy_with().setup_inference_engine(None, "hf")


def test_engine_settings_come_from_the_arguments():
    strategy = strategy_with()
    with pytest.raises(ValueError, match="nonsense"):
        strategy.setup_inference_engine({"engine_args": {"nonsense": 1}}, "fake", nn.Linear(2, 3))


def test_lengths_are_written_at_the_interval(tmp_path, told):
    strategy = strategy_with(echo_engine(), plot_every=2, log_dir=str(tmp_path))
    for _ in range(3):
        strategy.gather_and_generate({"max_tokens": 2}, [[1], [2]])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "gen_len_step_0.json",
        "gen_len_step_0.png",
        "gen_len_step_2.json",
        "gen_len_step_2.png",
    ]
    assert json.loads((tmp_path / "gen_len_step_2.json").read_text())["lengths"] == [2, 2]
    assert "mean_length=2.0" in told[-1]


def test_an_update_wakes_the_weights_sends_them_and_then_wakes_the_cache():
    strategy = strategy_with()
    actor = nn.Linear(3, 2)
    engine = strategy.setup_inference_engine(None, "fake", actor)
    tags = []
    wake_up = engine.wake_up

    def recorded(given=None):
        tags.append((given, "finish_weight_update" in engine.calls))
        wake_up(given)

    engine.wake_up = recorded
    engine.alias_weights = lambda tensors: False
    engine.calls.clear()
    strategy.update_engine_weights(actor)
    assert tags == [(("weights",), False), (None, True)]
    order = [name for name in engine.calls if name in ORDERED]
    assert order == [
        "wake_up",
        "begin_weight_update",
        "load_weights",
        "finish_weight_update",
        "reset_caches",
        "wake_up",
        "hash_parameters",
        "set_weights_version",
    ]
    assert strategy.inference_engine_status is EngineStatus.WAKEUP


ORDERED = {
    "wake_up",
    "begin_weight_update",
    "load_weights",
    "finish_weight_update",
    "reset_caches",
    "hash_parameters",
    "set_weights_version",
}


def test_a_failed_update_leaves_the_engine_awake_and_barred():
    strategy = strategy_with()
    actor = nn.Linear(3, 2)
    engine = strategy.setup_inference_engine(None, "fake", actor)
    engine.alias_weights = lambda tensors: False

    def refuse(pieces):
        raise ArithmeticError("planted")

    engine.load_weights = refuse
    with pytest.raises(RuntimeError, match="planted"):
        strategy.update_engine_weights(actor)
    assert strategy.inference_engine_status is EngineStatus.WAKEUP
    with pytest.raises(StaleEngineError):
        strategy.gather_and_generate({"max_tokens": 1}, [[1]])


def test_sleeping_until_a_sync_drops_the_weights_until_they_come_again():
    strategy = strategy_with()
    actor = nn.Linear(3, 2)
    engine = strategy.setup_inference_engine(None, "fake", actor)
    levels = []
    sleep = engine.sleep
    engine.sleep = lambda level=1: (levels.append(level), sleep(level))[0]
    engine.alias_weights = lambda tensors: False
    strategy.update_engine_weights(actor)
    strategy.sleep_until_weight_sync()
    strategy.sleep_until_weight_sync()
    assert levels == [2]
    assert engine.weights_were_dropped
    with pytest.raises(StaleEngineError, match="update_engine_weights"):
        strategy.gather_and_generate({"max_tokens": 1}, [[1]])
    strategy.update_engine_weights(actor)
    assert len(strategy.gather_and_generate({"max_tokens": 1}, [[1]])) == 1
    assert levels == [2, 1, 1]
    quiet = strategy_with(enable_engine_sleep=False)
    quiet.setup_inference_engine(None, "fake", actor)
    quiet.sleep_until_weight_sync()
    assert quiet.inference_engine_status is EngineStatus.WAKEUP

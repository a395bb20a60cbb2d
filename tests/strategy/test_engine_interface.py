"""How a strategy treats its engine; tests/contracts has what the published source says of it."""

import pytest
import torch
from tests.engines.fake_engine import FakeEngine
from torch import nn

from lightrft.engines.base import StaleEngineError
from lightrft.engines.types import EngineStatus, GenerationRequest, SamplingParams
from lightrft.strategy import get_fake_strategy

ONE_TOKEN = {"max_tokens": 1}


def echo(request, index):
    """Tokens that tell the prompt and the sample."""
    return [sum(request.prompt_token_ids) % 1000, len(request.prompt_token_ids), index], [-0.5] * 3


def strategy_with(**settings):
    return get_fake_strategy({"train_batch_size": 1, **settings})


@pytest.fixture
def echoing():
    """A strategy whose engine gives back what it is asked."""
    strategy = strategy_with()
    strategy.inference_engine = FakeEngine(script=echo)
    return strategy


@pytest.fixture
def started():
    """A strategy, its actor and an engine that holds the actor's weights and has its own memory."""
    strategy, actor = strategy_with(), nn.Linear(3, 2)
    engine = strategy.setup_inference_engine(None, "fake", actor)
    engine.alias_weights = lambda tensors: False
    engine.calls.clear()
    return strategy, actor, engine


def outputs(completions):
    return [c.output_token_ids for c in completions]


def test_local_generation_takes_one_prompt_and_gathered_generation_needs_one(echoing):
    assert outputs(echoing.engine_generate_local({}, [4, 5])) == [(9, 2, 0)]
    with pytest.raises(ValueError, match="all_prompt_token_ids or all_prompts"):
        echoing.gather_and_generate({})


@pytest.mark.parametrize(
    "given", [SamplingParams(n=2, max_tokens=2), {"n": 2, "max_tokens": 2, "stop": []}]
)
def test_sampling_parameters_have_two_forms(given, echoing):
    found = echoing.gather_and_generate(given, [[3], [4]])
    assert outputs(found) == [(3, 1), (3, 1), (4, 1), (4, 1)]
    assert [c.sample_index for c in found] == [0, 1, 0, 1]


def test_other_sampling_parameters_are_refused_with_the_accepted_forms(echoing):
    with pytest.raises(TypeError, match="SamplingParams or a mapping"):
        echoing.gather_and_generate(3, [[1]])
    with pytest.raises(ValueError, match="did you mean temperature"):
        echoing.gather_and_generate({"temprature": 1.0}, [[1]])
    with pytest.raises(ValueError, match="top_p"):
        echoing.gather_and_generate({"top_p": 2.0}, [[1]])
    assert echoing.inference_engine_status is EngineStatus.SLEEPED


def test_requests_keep_their_ids_and_bare_prompts_never_share_one(echoing):
    for prompts in ([[1], [2]], [[1]], [GenerationRequest((5,), request_id=77)]):
        echoing.gather_and_generate({}, prompts)
    assert [r.request_id for r in echoing.inference_engine.requests] == [0, 1, 2, 77]


def test_no_prompts_no_engine_call(echoing):
    assert echoing.gather_and_generate({}, []) == []
    assert "generate" not in echoing.inference_engine.calls


def test_only_none_images_mean_text(echoing):
    found = echoing.gather_and_generate({}, [[3]], all_prompts=["x"], all_images=[None])
    assert outputs(found) == [(3, 1, 0)]
    assert echoing.inference_engine.requests[0].prompt_text is None


def require_stale(strategy, actor):
    """Check that the engine samples again once it has the weights, and not before."""
    with pytest.raises(StaleEngineError, match="update_engine_weights"):
        strategy.gather_and_generate(ONE_TOKEN, [[1]])
    strategy.update_engine_weights(actor)
    assert len(strategy.gather_and_generate(ONE_TOKEN, [[1]])) == 1


def test_an_optimizer_step_makes_the_engine_stale_until_the_next_update():
    strategy = strategy_with(actor_learning_rate=0.1, lr_warmup_ratio=0.0)
    actor, *_ = strategy.prepare_models_and_optimizers(nn.Linear(3, 2), None, None, None, None, 10)
    strategy.setup_inference_engine(None, "fake", actor)
    strategy.backward(actor.model(torch.ones(1, 3)).sum(), actor, actor.optimizer)
    strategy.optimizer_step(actor.optimizer, actor, actor.scheduler)
    require_stale(strategy, actor)


def test_an_engine_is_closed_when_another_takes_its_place_and_with_the_strategy(started):
    strategy, actor, first = started
    second = strategy.setup_inference_engine(None, "fake", actor)
    assert first.calls[-1] == "close"
    assert strategy.inference_engine is second
    for _ in range(2):
        assert "close" not in second.calls[:-1]
        strategy.close()
        assert second.calls[-1] == "close"
    assert strategy.inference_engine is None


def test_engine_type_has_one_truth_afterwards(capsys):
    strategy = strategy_with(engine_type="vllm")
    strategy.setup_inference_engine(None, "fake", nn.Linear(2, 3))
    assert strategy.config.engine_type == strategy.engine_type == "fake"
    assert strategy.inference_engine_type == "fake"
    assert "the configuration said vllm" in capsys.readouterr().out


def test_an_engine_without_a_model_or_with_unknown_options_is_refused():
    with pytest.raises(ValueError, match="pretrain"):
        strategy_with().setup_inference_engine(None, "hf")
    with pytest.raises(ValueError, match="nonsense"):
        strategy_with().setup_inference_engine(
            {"engine_args": {"nonsense": 1}}, "fake", nn.Linear(2, 3)
        )


def test_an_update_wakes_the_weights_sends_them_and_then_wakes_the_cache(started):
    strategy, actor, engine = started
    tags, wake_up = [], engine.wake_up

    def recorded(given=None):
        tags.append((given, "finish_weight_update" in engine.calls))
        wake_up(given)

    engine.wake_up = recorded
    strategy.update_engine_weights(actor)
    assert tags == [(("weights",), False), (None, True)]
    assert strategy.inference_engine_status is EngineStatus.WAKEUP


def test_a_failed_update_leaves_the_engine_awake_and_barred(started):
    strategy, actor, engine = started
    engine.load_weights = lambda pieces: 1 / 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        strategy.update_engine_weights(actor)
    assert strategy.inference_engine_status is EngineStatus.WAKEUP
    with pytest.raises(StaleEngineError):
        strategy.gather_and_generate(ONE_TOKEN, [[1]])


def test_sleeping_until_a_sync_drops_the_weights_until_they_come_again(started):
    strategy, actor, engine = started
    levels, sleep = [], engine.sleep
    engine.sleep = lambda level=1: (levels.append(level), sleep(level))[0]
    strategy.update_engine_weights(actor)
    strategy.sleep_until_weight_sync()
    strategy.sleep_until_weight_sync()
    assert levels == [2]
    assert engine.weights_were_dropped
    require_stale(strategy, actor)
    assert levels == [2, 1, 1]
    quiet = strategy_with(enable_engine_sleep=False)
    awake = quiet.setup_inference_engine(None, "fake", actor)
    quiet.gather_and_generate(ONE_TOKEN, [[1]])
    quiet.sleep_until_weight_sync()
    assert "sleep" not in awake.calls
    assert quiet.inference_engine_status is EngineStatus.WAKEUP

"""The source of `lightrft.strategy.strategy_base`: what it says of the rollout engine.

Each test quotes the promise it checks. Gathering over several ranks is checked with real process
groups in tests/strategy/test_distributed_context.py.
"""

import pytest
import torch
from tests.engines.fake_engine import FakeEngine
from torch import nn

from lightrft.engines.types import EngineConfig, MultiModalInputs
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.strategy_base import EngineStatus, StrategyBase

IMAGE = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def echo(request, index):
    return [sum(request.prompt_token_ids) % 1000, index], [-0.5, -0.25]


def strategy_with(**settings):
    strategy = get_fake_strategy({"train_batch_size": 1, **settings})
    strategy.inference_engine = FakeEngine(EngineConfig("fake", ""), script=echo)
    return strategy


def test_the_status_has_two_values_and_starts_asleep():
    """'SLEEPED: Engine is in sleep mode / WAKEUP: Engine is awake and ready' (0 and 1)."""
    assert [(s.name, s.value) for s in EngineStatus] == [("SLEEPED", 0), ("WAKEUP", 1)]
    strategy = get_fake_strategy()
    assert strategy.inference_engine is None
    assert strategy.inference_engine_status is EngineStatus.SLEEPED


def test_setup_sends_weights_then_sleeps_and_returns_the_engine():
    """'if actor is not None: update_engine_weights(actor); maybe_sleep_inference_engine();
    return self.inference_engine'."""
    strategy = get_fake_strategy({"train_batch_size": 1})
    engine = strategy.setup_inference_engine(None, "fake", actor=nn.Linear(2, 3))
    assert engine is strategy.inference_engine
    assert strategy.inference_engine_type == "fake"
    assert engine.calls[-2:] == ["set_weights_version", "sleep"]
    assert strategy.inference_engine_status is EngineStatus.SLEEPED


def test_sleeping_and_waking_are_logged_and_idempotent(caplog):
    """'Sleeped inference engine', 'Finished {type} wakeup, TIMECOST'; WAKEUP returns at once."""
    caplog.set_level("INFO")
    strategy = strategy_with()
    for _ in range(2):
        strategy.maybe_sleep_inference_engine()
    assert strategy.inference_engine.calls == ["sleep"]
    for _ in range(2):
        strategy.wakeup_inference_engine()
    assert strategy.inference_engine.calls == ["sleep", "wake_up"]
    assert caplog.text.count("Sleeped inference engine") == 1
    assert caplog.text.count("Finished fake wakeup, TIMECOST") == 1


def test_sleeping_needs_enable_engine_sleep():
    """'if self.inference_engine is not None and self.args.enable_engine_sleep'."""
    strategy = strategy_with(enable_engine_sleep=False)
    strategy.maybe_sleep_inference_engine()
    assert strategy.inference_engine_status is EngineStatus.WAKEUP


def test_memory_is_cleared_before_waking_and_after_sleeping(monkeypatch):
    """'To avoid OOM, we: 1. sync and clear cache 2. wakeup engine'."""
    strategy = strategy_with()
    calls = strategy.inference_engine.calls
    monkeypatch.setattr(strategy.context, "free_memory", lambda: calls.append("clear"))
    strategy.maybe_sleep_inference_engine()
    strategy.wakeup_inference_engine()
    assert calls == ["sleep", "clear", "clear", "wake_up"]


def test_local_generation_takes_exactly_one_kind_of_input():
    """'Either prompt_token_ids or multi_modal_inputs must be provided.' / 'Both ... can not be
    provided at the same time.'"""
    strategy = strategy_with()
    with pytest.raises(ValueError, match=r"^Either prompt_token_ids or multi_modal_inputs must be"):
        strategy.engine_generate_local({})
    with pytest.raises(ValueError, match="can not be provided at the same time"):
        strategy.engine_generate_local({}, [[1]], [{"prompt": "x"}])


def test_local_generation_returns_prompt_and_output_ids():
    """'A list of generated outputs ...' with prompt_token_ids and output_token_ids."""
    found = strategy_with().engine_generate_local({"n": 1}, [[4, 5], [6]])
    assert [list(c.prompt_token_ids) for c in found] == [[4, 5], [6]]
    assert [list(c.output_token_ids) for c in found] == [[9, 0], [6, 0]]


def test_multimodal_inputs_reach_the_engine_whole():
    """'multi_modal_inputs = [{"prompt": ..., "multi_modal_data": {"image": [...], ...}}]'."""
    strategy = strategy_with()
    item = {"prompt": "look", "multi_modal_data": {"image": ["a", "b"], "video": ["v"]}}
    strategy.engine_generate_local({}, multi_modal_inputs=[item])
    request = strategy.inference_engine.requests[-1]
    assert request.prompt_text == "look"
    assert request.multi_modal == MultiModalInputs(("a", "b"), ("v",))


@pytest.mark.parametrize(
    "images",
    [[["1a", "1b"], ["2a"], ["3a", "3b", "3c"]], ["1a", "1b", "2a", "3a", "3b", "3c"]],
    ids=["nested", "flattened"],
)
def test_both_formats_of_images_are_grouped_alike(images):
    """'Format 1 - Nested List ... Format 2 - Flattened List', images_num = [2, 1, 3]."""
    built = StrategyBase._build_multimodal_inputs(["p", "q", "r"], images, [2, 1, 3], None, None)
    assert [item["multi_modal_data"]["image"] for item in built] == [
        ["1a", "1b"],
        ["2a"],
        ["3a", "3b", "3c"],
    ]


def test_prompts_without_media_lose_their_placeholders():
    """'List of dicts with prompt and optional multi_modal_data keys'."""
    prompts = [f"a{IMAGE}b", f"c{VIDEO}d", f"e{IMAGE}{VIDEO}"]
    built = StrategyBase._build_multimodal_inputs(prompts, [None, None, "i"], None, None, None)
    assert built == [
        {"prompt": "ab"},
        {"prompt": "cd"},
        {"prompt": prompts[2], "multi_modal_data": {"image": ["i"]}},
    ]


def test_every_kind_of_multimodal_batch_is_generated():
    """One image, several images, video only, mixed; counts that differ are an error."""
    strategy = strategy_with()
    strategy.gather_and_generate(
        {},
        all_prompts=["a", "b", "c", "d"],
        all_images=["1", "2", "3"],
        images_num=[1, 0, 2, 0],
        all_videos=["v", "w"],
        videos_num=[0, 1, 1, 0],
    )
    assert [request.multi_modal for request in strategy.inference_engine.requests] == [
        MultiModalInputs(("1",)),
        MultiModalInputs((), ("v",)),
        MultiModalInputs(("2", "3"), ("w",)),
        MultiModalInputs(),
    ]
    with pytest.raises(ValueError, match="sum"):
        strategy.gather_and_generate(
            {}, all_prompts=["a", "b"], all_images=["1", "2", "3"], images_num=[1, 1]
        )
    with pytest.raises(ValueError, match="all_prompts"):
        strategy.gather_and_generate({}, [[1]], all_images=["1"])


def test_generation_needs_an_engine():
    """'raise NotImplementedError("Inference engine is not initialized.")'."""
    with pytest.raises(NotImplementedError, match=r"^Inference engine is not initialized\.$"):
        get_fake_strategy().gather_and_generate({}, [[1]])


def test_generation_wakes_the_engine_and_sleeps_afterwards_as_told():
    """'Optionally putting the inference engine to sleep to conserve memory'."""
    strategy = strategy_with()
    strategy.maybe_sleep_inference_engine()
    strategy.gather_and_generate({}, [[1]], sleep_engine=False)
    assert strategy.inference_engine_status is EngineStatus.WAKEUP
    strategy.gather_and_generate({}, [[1]])
    assert strategy.inference_engine_status is EngineStatus.SLEEPED
    assert strategy._profile_step == 2


def test_a_failed_generation_leaves_a_defined_state():
    """Asleep if sleeping is enabled and wanted, awake otherwise; usable at once either way."""

    def script(request, index):
        if request.prompt_token_ids[0] == 13:
            raise ArithmeticError("planted")
        return echo(request, index)

    strategy = strategy_with()
    strategy.inference_engine = FakeEngine(EngineConfig("fake", ""), script=script)
    for sleeps, status in ((True, EngineStatus.SLEEPED), (False, EngineStatus.WAKEUP)):
        with pytest.raises(ArithmeticError, match="planted"):
            strategy.gather_and_generate({}, [[13]], sleep_engine=sleeps)
        assert strategy.inference_engine_status is status
        assert len(strategy.gather_and_generate({}, [[4]], sleep_engine=False)) == 1


def test_updates_without_an_engine_are_skipped_with_a_line(capsys):
    """'Skip update engine weights since inference engine is not initialized.'"""
    assert get_fake_strategy().update_engine_weights(nn.Linear(1, 1)) is None
    assert (
        "Skip update engine weights since inference engine is not initialized."
        in capsys.readouterr().out
    )


def test_an_update_wakes_the_engine_and_honours_another_actor():
    """'1. wakeup engine if sleeped'; the actor is the one of this call, not of the first."""
    torch.manual_seed(0)
    strategy = get_fake_strategy({"train_batch_size": 1})
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    engine = strategy.setup_inference_engine(None, "fake", actor=first)
    hashes = engine.hash_parameters()
    strategy.update_engine_weights(second)
    assert strategy.inference_engine_status is EngineStatus.WAKEUP
    assert engine.hash_parameters() != hashes
    strategy.update_engine_weights(first)
    assert engine.hash_parameters() == hashes


class OwnParameters:
    """Stands for an engine's own sampling object."""


class ConvertingEngine(FakeEngine):
    def params_of_native(self, native):
        from lightrft.engines import SamplingParams

        return SamplingParams(n=2, max_tokens=2) if isinstance(native, OwnParameters) else None


def test_the_engines_own_sampling_object_is_accepted():
    """':param sampling_params: Parameters used for controlling the generation process'."""
    strategy = strategy_with()
    strategy.inference_engine = ConvertingEngine(EngineConfig("fake", ""), script=echo)
    found = strategy.gather_and_generate(OwnParameters(), [[1], [2]], sleep_engine=False)
    assert len(found) == 4
    assert len(strategy.engine_generate_local(OwnParameters(), [[1]])) == 2
    with pytest.raises(TypeError, match="the engine's own object, got"):
        strategy.gather_and_generate(object(), [[1]])

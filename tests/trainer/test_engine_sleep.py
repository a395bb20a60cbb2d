"""When the engine sleeps during a step, and how deeply."""

import pytest
from tests.engines.altered_engines import CopyingEngine, plant


class RecordingEngine(CopyingEngine):
    """Has storage of its own, and says when it is put to sleep."""

    def __init__(self, config, *, module=None):
        super().__init__(config, module=module)
        self.events = []

    def generate(self, requests, sampling_params, **keywords):
        self.events.append("generate")
        return super().generate(requests, sampling_params, **keywords)

    def sleep(self, level=1):
        self.events.append(f"sleep {level}")
        super().sleep(level)


def recording_world(build_world, **options):
    world = build_world(**options)
    engine = plant(world.strategy, world.trainer.actor, RecordingEngine)
    engine.events.clear()
    return world, engine


@pytest.mark.parametrize("every, first", [(0, "sleep 1"), (-1, "sleep 2")])
def test_weights_are_dropped_while_the_trainer_makes_new_ones(build_world, every, first):
    """A step whose logprobs are compared keeps them, to explain a difference."""
    world, engine = recording_world(build_world, parity_check_steps=every)
    for _step in (1, 2):
        world.step()
    generations = [event for event in engine.events if not event.startswith("generate")]
    assert generations == [first, "sleep 2"]
    assert engine.weights_version == 2


@pytest.mark.parametrize(
    "options",
    [{"advantage_estimator": "remax"}, {"stream_chunk": 3}],
    ids=["greedy-and-sampled", "chunks"],
)
def test_several_generations_of_a_step_wake_the_engine_once(build_world, options):
    world, engine = recording_world(build_world, parity_check_steps=-1, **options)
    world.trainer.make_experience()
    canary_free = engine.events[engine.events.index("generate") :]
    assert canary_free == ["generate", "generate", "sleep 2"]


def test_an_experience_that_is_not_trained_on_costs_a_sync_and_no_error(build_world):
    world, engine = recording_world(build_world, parity_check_steps=-1)
    world.trainer.make_experience()
    assert engine.weights_were_dropped
    world.step()
    assert not engine.weights_were_dropped


def test_a_run_that_is_stopped_behind_its_rollout_draws_again_with_that_version(
    build_world, tmp_path
):
    # Asked before each step, and between its rollout and its update.
    asked, options = iter([False] * 3 + [True]), {"ckpt_path": str(tmp_path)}
    world, engine = recording_world(build_world, parity_check_steps=-1, **options)
    assert world.trainer.fit(stop_request=lambda: next(asked)).was_stopped
    assert (engine.weights_version, engine.weights_were_dropped) == (1, True)
    world, engine = recording_world(build_world, parity_check_steps=-1, **options)
    assert world.trainer.load_checkpoint()
    assert engine.weights_version == 1


def test_an_engine_that_may_not_sleep_stays_awake(build_world):
    world, engine = recording_world(build_world, args={"enable_engine_sleep": False})
    world.trainer.make_experience()
    assert not any(event.startswith("sleep") for event in engine.events)

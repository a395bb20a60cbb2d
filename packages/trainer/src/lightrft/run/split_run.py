"""A run whose last ranks only generate: each process takes its side, and both end alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

from lightrft.config import EngineChoiceOptions, RolloutOptions, TrainConfig
from lightrft.config.files import held_folder
from lightrft.config.parts.machine import sends_adapters
from lightrft.config.registry import STAGES
from lightrft.reporting.files import rank_log
from lightrft.reporting.loggers import rank_timeline
from lightrft.run.threads import choose_threads
from lightrft.stages.metrics import RunAlarmError
from lightrft.strategy.distributed.context import console_sink
from lightrft.strategy.distributed.process_end import RunStoppedError
from lightrft.strategy.distributed.process_groups import leave_side, take_side
from lightrft.strategy.engine.generation import check_engine_type
from lightrft.strategy.engine.session import EngineSession
from lightrft.strategy.split.bridge import END, Bridge
from lightrft.strategy.split.remote_engine import RemoteEngine


@contextmanager
def open_bridge(config: RolloutOptions) -> Iterator[Bridge]:
    """Yield the connection of the two sides; this process belongs to one of them from now on."""
    timeout = timedelta(minutes=config.timeout_minutes)
    side, store = take_side(config.rollout_ranks, timeout)
    try:
        bridge = Bridge(side, store, timeout)
        try:
            yield bridge
        finally:
            bridge.close()
    finally:
        leave_side()


def join_engines(
    bridge: Bridge,
    config: EngineChoiceOptions,
    session: EngineSession,
    stop_request: Callable[[], bool],
) -> Callable[[], bool]:
    """Give the session the engines of the ranks that generate; return the check for a stop."""
    session.engine = RemoteEngine(bridge, check_engine_type(config.engine_type))
    return partial(bridge.asked_to_stop, stop_request)


@contextmanager
def both_end(bridge: Bridge) -> Iterator[list[object]]:
    """Send the end of the run to the ranks that generate, if all that train know it.

    Yields:
        List for the summary of the run.
    """
    summary: list[object] = []
    try:
        yield summary
    except (RunStoppedError, RunAlarmError) as error:
        bridge.send(END, error)
        raise
    bridge.send(END, summary[0])


def generate_for(config: TrainConfig, bridge: Bridge, wants_stop: Callable[[], bool]) -> object:
    """Run this process as one that only generates, until the other side ends.

    Returns:
        Summary of the run.

    Raises:
        RunStoppedError, RunAlarmError: Error that ended the run there.
    """
    from lightrft.stages.models import load_policy
    from lightrft.stages.policy.inputs import PolicyInputs
    from lightrft.stages.policy.split.generating_side import (
        build_generator,
        generating_options,
        open_strategy,
    )

    config = config.replaced({"enable_engine_sleep": False})
    with ExitStack() as stack:
        stack.enter_context(rank_log(Path(config.output_dir), bridge.rank))
        stack.enter_context(held_folder(Path(config.output_dir)))
        stack.enter_context(rank_timeline(Path(config.output_dir), bridge.rank))
        stack.enter_context(console_sink(lambda *_: None))
        read = cast("Callable[[TrainConfig], PolicyInputs]", STAGES.load("policy"))
        inputs = read(config.replaced(generating_options(config)))
        stack.callback(inputs.close)
        strategy = stack.enter_context(open_strategy(config))
        choose_threads(config, strategy.context)
        actor, kind = None, check_engine_type(config.engine_type)
        are_packed = config.quantize is not None
        if config.lora_rank and sends_adapters(config.lora_sync, kind, are_packed=are_packed):
            # Without memory: the engine sees in it which layers have adapters.
            with strategy.init_model_context(True):
                actor = load_policy(str(config.pretrain), config)
        strategy.session.start(strategy.config, kind, actor, inputs.statements.vocabulary)
        loader = inputs.loader(config, strategy.context)
        generator = build_generator(
            config, inputs, strategy.backend, strategy.session, loader, bridge, wants_stop
        )
        stack.callback(generator.logs.close)
        end = bridge.serve(generator.handlers())
        if isinstance(end, Exception):
            raise end
        return end

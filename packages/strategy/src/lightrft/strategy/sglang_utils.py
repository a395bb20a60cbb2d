"""The sglang engine from a strategy's options."""

from functools import partial

from lightrft.strategy.engine.generation import rollout_engine

get_sglang_engine_for_rollout = partial(rollout_engine, engine_type="sglang")

"""The helper modules that the source of `strategy_base` imports are importable."""

import importlib

import pytest
from tests.engines.fake_engine import FakeEngine

from lightrft.engines.types import EngineConfig
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.distributed.collectives import ALONE

IMPORTS = """
lightrft.strategy.utils.distributed_util gather_inputs_object_for_inference create_sub_group
lightrft.strategy.utils.broadcast_utils BroadcastManager
lightrft.strategy.utils.data_utils DistributedSampler
lightrft.strategy.utils.parallel_utils SPDataProcessor
lightrft.strategy.utils.statistic GenLenAnalyser
lightrft.strategy.sglang_utils get_sglang_engine_for_rollout
lightrft.strategy.vllm_utils get_vllm_engine_for_rollout
lightrft.strategy.config StrategyConfig
"""
# Not `{get,set}_sequence_parallel_group`: the group belongs to a strategy (`sp_group`), not to the
# process.


@pytest.mark.parametrize("line", IMPORTS.strip().splitlines())
def test_names_are_where_the_source_imports_them(line):
    module, *names = line.split()
    for name in names:
        assert callable(vars(importlib.import_module(module))[name]), name


def test_the_helpers_do_what_they_are_named_for():
    from lightrft.strategy.engine.generation import rollout_engine
    from lightrft.strategy.utils.broadcast_utils import BroadcastManager
    from lightrft.strategy.utils.distributed_util import gather_inputs_object_for_inference

    assert gather_inputs_object_for_inference([[1], [2]], ALONE) == [[1], [2]]
    engine = rollout_engine(StrategyConfig(pretrain="unread"), "fake")
    assert isinstance(engine, FakeEngine)
    import torch

    with get_fake_strategy({"train_batch_size": 1}) as strategy:
        actor = torch.nn.Linear(3, 2)
        config = EngineConfig("fake", "")
        engine = FakeEngine.for_module(config, actor)
        report = BroadcastManager(actor, strategy, engine).broadcast_to_engine()
        assert report is not None
        assert strategy.inference_engine is engine
        assert engine.weights_version == 0

"""Sending weights to the rollout engine."""

from lightrft.engines.base import RolloutEngine
from lightrft.strategy.backend import AnyModel
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.weight_sync.sync import WeightSyncReport


class BroadcastManager:
    """`update_engine_weights` of one actor and one engine.

    Args:
        actor: Model or PreparedModel.
        strategy: Strategy that prepared the actor.
        inference_engine: Engine, which becomes the strategy's.
    """

    def __init__(
        self, actor: AnyModel, strategy: StrategyBase, inference_engine: RolloutEngine
    ) -> None:
        self.actor = actor
        self.strategy = strategy
        if strategy.inference_engine is not inference_engine:
            strategy.inference_engine = inference_engine

    def broadcast_to_engine(self) -> WeightSyncReport | None:
        """Send the weights; see `StrategyBase.update_engine_weights`."""
        return self.strategy.update_engine_weights(self.actor)

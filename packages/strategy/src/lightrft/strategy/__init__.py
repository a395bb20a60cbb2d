"""Training strategies: DeepSpeed ZeRO, FSDP2 and a single process behind one interface."""

from typing import TYPE_CHECKING

from lightrft.kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lightrft.engines.types import EngineStatus as EngineStatus
    from lightrft.strategy.config import StrategyConfig as StrategyConfig
    from lightrft.strategy.factory import get_strategy as get_strategy
    from lightrft.strategy.fake import (
        FakeStrategy as FakeStrategy,
        get_fake_strategy as get_fake_strategy,
    )
    from lightrft.strategy.strategy_base import (
        PreparedModel as PreparedModel,
        StrategyBase as StrategyBase,
        is_engine as is_engine,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

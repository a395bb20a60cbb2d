"""The one record of options, the registries of choices, and TOML files. Standard library only."""

from lightrft.config.options import ConfigError
from lightrft.config.registry import register
from lightrft.config.strategy_config import StrategyConfig
from lightrft.config.train_config import TrainConfig

__all__ = ["ConfigError", "StrategyConfig", "TrainConfig", "register"]

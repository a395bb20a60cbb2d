"""The configuration of a strategy; it is part of the one record in `lightrft.config`."""

from lightrft.config.options import ConfigError, mask_address, option
from lightrft.config.parts.machine import ENGINE_TYPES, MERGED
from lightrft.config.strategy_config import StrategyConfig

__all__ = [
    "ENGINE_TYPES",
    "MERGED",
    "ConfigError",
    "StrategyConfig",
    "mask_address",
    "option",
]

"""Choice of the training strategy."""

import importlib.util

from lightrft.config import StrategyConfig
from lightrft.strategy.backend import Arguments, published_sizes
from lightrft.strategy.strategy_base import StrategyBase


def get_strategy(args: Arguments) -> StrategyBase:
    """Return FSDP2 if `fsdp` is set or DeepSpeed is neither installed nor asked for, else ZeRO.

    Start the process by torchrun: the process group is created here.

    Args:
        args: A Namespace, mapping or StrategyConfig; kept as `strategy.args`.

    Raises:
        ConfigError: Values are wrong; the message names all of them.
        ImportError: An option asks for DeepSpeed, which is not installed.
        RuntimeError: The launcher's environment variables are missing.
    """
    config = StrategyConfig.from_args(args).with_installed_backend()
    sizes = published_sizes(config)
    if config.fsdp:
        from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy

        return FSDPV2Strategy(*sizes, args=args)
    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError(
            f"{', '.join(config.deepspeed_options())}: the DeepSpeed strategy needs the package "
            "deepspeed, which is not installed: install lightrft[deepspeed], or choose FSDP2 with "
            "--fsdp"
        )
    from lightrft.strategy.deepspeed.strategy import DeepspeedStrategy

    return DeepspeedStrategy(*sizes, zero_stage=config.zero_stage, args=args)

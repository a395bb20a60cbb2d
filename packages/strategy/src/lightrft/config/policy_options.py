"""Options of reinforcement."""

from lightrft.config.options import option, part
from lightrft.config.parts.learning import LearningOptions
from lightrft.config.parts.machine import ENGINE_TYPES, BuildOptions
from lightrft.config.parts.rollout import RolloutOptions
from lightrft.config.parts.rows import PromptDataOptions
from lightrft.config.parts.run_control import OutputOptions
from lightrft.config.strategy_config import StrategyConfig


# A whole run chooses its engine; the published default of a strategy is vllm.
@part("engine")
class PolicyOptions(
    OutputOptions,
    LearningOptions,
    RolloutOptions,
    PromptDataOptions,
    BuildOptions,
    StrategyConfig,
):
    """Options of reinforcement."""

    engine_type: str = option(
        "auto",
        "Rollout engine; auto takes vllm or sglang on a GPU, else hf.",
        choices=ENGINE_TYPES,
        common=True,
    )
